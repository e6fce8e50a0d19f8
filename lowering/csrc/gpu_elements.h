// Elements of the three dtypes, 16 bytes of x's at a time: how they are read, widened to fp32,
// rounded and written. (No guard, as gpu_params.h says.)

template <int DTYPE>
struct Tile {
  static constexpr int kCount = kElements * (DTYPE == kFloat32 ? 4 : 2) / 4;
  u32 w[kCount];
};

template <>
struct Tile<-1> {
  u32 w[1];
};

// Elements [first, first + kElements) of an array; `left` of them exist, the others read as 0.
template <int DTYPE>
DEVICE void read(Tile<DTYPE>& tile, const void* base, u64 first, int left) {
  if constexpr (DTYPE < 0) return;
  else if constexpr (ALIGNED) {
    const char* p = static_cast<const char*>(base) + first * (DTYPE == kFloat32 ? 4 : 2);
    if constexpr (Tile<DTYPE>::kCount == 2) {
      const u64 v = load(reinterpret_cast<const u64*>(p));
      tile.w[0] = static_cast<u32>(v);
      tile.w[1] = static_cast<u32>(v >> 32);
    } else {
#pragma unroll
      for (int i = 0; i < Tile<DTYPE>::kCount; i += 4) {
        const Words v = load(reinterpret_cast<const Words*>(p) + i / 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) tile.w[i + k] = v.w[k];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if constexpr (DTYPE == kFloat32) {
        tile.w[i] = i < left ? load(static_cast<const u32*>(base) + first + i) : 0u;
      } else {
        const u32 v = i < left ? load(static_cast<const u16*>(base) + first + i) : 0u;
        if (i & 1) tile.w[i / 2] |= v << 16;
        else tile.w[i / 2] = v;
      }
    }
  }
}

template <int DTYPE>
DEVICE void widen(const Tile<DTYPE>& tile, float (&v)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += 2) {
    if constexpr (DTYPE == kFloat32) {
      v[i] = as_float(tile.w[i]);
      v[i + 1] = as_float(tile.w[i + 1]);
    } else {
      v[i] = low_of<DTYPE>(tile.w[i / 2]);
      v[i + 1] = high_of<DTYPE>(tile.w[i / 2]);
    }
  }
}

template <int DTYPE>
DEVICE Tile<DTYPE> narrow(const float (&v)[kElements]) {
  Tile<DTYPE> tile;
#pragma unroll
  for (int i = 0; i < kElements; i += 2) {
    if constexpr (DTYPE == kFloat32) {
      tile.w[i] = as_word(v[i]);
      tile.w[i + 1] = as_word(v[i + 1]);
    } else {
      tile.w[i / 2] = pack<DTYPE>(v[i], v[i + 1]);
    }
  }
  return tile;
}

template <int DTYPE>
DEVICE void write(void* base, u64 first, int left, const float (&v)[kElements]) {
  const Tile<DTYPE> tile = narrow<DTYPE>(v);
  if constexpr (ALIGNED) {
    char* p = static_cast<char*>(base) + first * (DTYPE == kFloat32 ? 4 : 2);
    if constexpr (Tile<DTYPE>::kCount == 2) {
      *reinterpret_cast<u64*>(p) = tile.w[0] | static_cast<u64>(tile.w[1]) << 32;
    } else {
#pragma unroll
      for (int i = 0; i < Tile<DTYPE>::kCount; i += 4)
        reinterpret_cast<Words*>(p)[i / 4] =
            Words{{tile.w[i], tile.w[i + 1], tile.w[i + 2], tile.w[i + 3]}};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i >= left) break;
      if constexpr (DTYPE == kFloat32) static_cast<u32*>(base)[first + i] = tile.w[i];
      else static_cast<u16*>(base)[first + i] = static_cast<u16>(tile.w[i / 2] >> 16 * (i & 1));
    }
  }
}

template <int DTYPE>
DEVICE void round_to(float (&v)[kElements]) {
  if constexpr (DTYPE != kFloat32) {
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const u32 pair = pack<DTYPE>(v[i], v[i + 1]);
      v[i] = low_of<DTYPE>(pair);
      v[i + 1] = high_of<DTYPE>(pair);
    }
  }
}

// The same for 16 bytes of x as they travel.
DEVICE Words read_words(const void* base, u64 first, int left) {
  Tile<X_DTYPE> tile;
  read(tile, base, first, left);
  return Words{{tile.w[0], tile.w[1], tile.w[2], tile.w[3]}};
}

DEVICE void widen_words(const Words& v, float (&to)[kElements]) {
  Tile<X_DTYPE> tile;
#pragma unroll
  for (int i = 0; i < 4; ++i) tile.w[i] = v.w[i];
  widen(tile, to);
}

DEVICE Words narrow_words(const float (&v)[kElements]) {
  const Tile<X_DTYPE> tile = narrow<X_DTYPE>(v);
  return Words{{tile.w[0], tile.w[1], tile.w[2], tile.w[3]}};
}
