/* Launches the calls of a site. Plain C: no header of torch's or CUDA's is read, the driver's
 * launch function comes as an address.
 *
 * Python (gpu_site.py) does the first call with each number of rows and leaves here what that
 * came to: a list of launches, each with its kernel, grid and parameters. From then on a call
 * writes its pointers into the parameters and launches. What a list doesn't cover goes back to
 * Python: another number of rows, another stream than the group's last call was on, a pointer
 * that isn't aligned, a failure that a kernel reported. So nothing is decided here.
 *
 * The caller holds Python's lock, or whatever else keeps two calls of a group apart.
 */
#ifdef FX_FUSION_PYTHON
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { kArrays = 10, kInputs = 4, kEps = 4, kScale = 5, kParameterBytes = 512, kAlignment = 16 };

/* Why a call wasn't made; `gpu_launch.py` has the same numbers. */
enum {
  kLaunched = 0,
  kFailedBefore = 1,
  kOtherStream = 2,
  kUnknownRows = 3,
  kMisaligned = 4,
  kOtherCall = 5
};

/* CUlaunchConfig of the driver. */
typedef struct {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
} Config;

typedef int (*LaunchKernel)(const Config*, void* function, void** parameters, void** extra);

typedef struct {
  void* function;
  Config config;
  uint32_t cluster; /* blocks */
  uint32_t parameter_bytes;
  /* Begins with the arrays, then rows, clusters, eps and scale; `_CALL` of gpu_kernel.py. */
  unsigned char parameters[kParameterBytes];
} Kernel;

typedef struct {
  Kernel* kernel;
  int64_t first; /* row */
  int32_t rows;
  uint32_t clusters;
} Launch;

typedef struct {
  int64_t rows;
  int64_t count;
  const Launch* launches;
} Call;

typedef struct {
  LaunchKernel launch;
  const volatile int32_t* failed;   /* not zero once a kernel of the group failed */
  const volatile uint64_t* stream;  /* of the group's last call */
  const void* group;                /* the process group as a Python object */
  const Call* calls;                /* by rows, ascending */
  int64_t call_count;
  int64_t strides[kArrays];         /* bytes from row to row */
  float eps;
  float scale;
  int32_t takes_eps_pointer;        /* eps may come as a float32 tensor on the GPU */
} Site;

typedef struct {
  char* arrays[kArrays];
  int32_t rows;
  uint32_t clusters;
  float eps;
  float scale;
} CallParameters;

static const Call* find(const Site* site, int64_t rows) {
  int64_t low = 0, high = site->call_count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (site->calls[middle].rows < rows) low = middle + 1;
    else high = middle;
  }
  return low < site->call_count && site->calls[low].rows == rows ? &site->calls[low] : 0;
}

/* Make one call. Returns 0, or why it wasn't made, or minus the driver's error where a launch
 * failed after others of the call had been made. */
int fx_fusion_launch(const Site* site, uint64_t stream, int64_t rows, float eps, float scale,
                     char* const* arrays) {
  const Call* call = find(site, rows);
  if (call == 0) return kUnknownRows;
  if (*site->failed != 0) return kFailedBefore;
  if (*site->stream != stream) return kOtherStream;
  for (int i = 0; i < kArrays; ++i)
    if (i != kEps && i != kScale && (uintptr_t)arrays[i] % kAlignment != 0) return kMisaligned;
  for (int64_t i = 0; i < call->count; ++i) {
    const Launch* launch = &call->launches[i];
    Kernel* kernel = launch->kernel;
    CallParameters* parameters = (CallParameters*)kernel->parameters;
    void* block = kernel->parameters;
    for (int k = 0; k < kArrays; ++k)
      parameters->arrays[k] = arrays[k] == 0 ? 0 : arrays[k] + launch->first * site->strides[k];
    parameters->rows = launch->rows;
    parameters->clusters = launch->clusters;
    parameters->eps = eps;
    parameters->scale = scale;
    kernel->config.grid[0] = launch->clusters * kernel->cluster;
    kernel->config.stream = (void*)(uintptr_t)stream;
    const int status = site->launch(&kernel->config, kernel->function, &block, 0);
    /* The first may fail for want of a context in this thread, which Python repairs. */
    if (status != 0) return i == 0 ? kOtherCall : -status;
  }
  return kLaunched;
}

/* Sizes that the structures of gpu_launch.py must have. */
void fx_fusion_launch_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Config);
  sizes[1] = sizeof(Kernel);
  sizes[2] = sizeof(Launch);
  sizes[3] = sizeof(Call);
  sizes[4] = sizeof(Site);
}

#ifdef FX_FUSION_PYTHON

/* What a site's Python entry point holds. */
typedef struct {
  Site* site;
  PyObject* slow;    /* called with the same arguments where no launch was made */
  PyObject* groups;  /* dict: the process groups that haven't been destroyed */
} Entry;

static PyObject* data_ptr_name;
static const char* const kCapsule = "fx_fusion.gpu_launch";

static void release(PyObject* capsule) {
  Entry* entry = (Entry*)PyCapsule_GetPointer(capsule, kCapsule);
  if (entry == 0) return;
  Py_XDECREF(entry->slow);
  Py_XDECREF(entry->groups);
  PyMem_Free(entry);
}

/* A tensor's address; None has none. */
static int address_of(PyObject* tensor, char** address) {
  *address = 0;
  if (tensor == Py_None) return 0;
  PyObject* number = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
  if (number == 0) return -1;
  *address = (char*)PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  return PyErr_Occurred() ? -1 : 0;
}

/* A number given in a call, or the site's own for None; 0 for a tensor. */
static int number_of(PyObject* given, float* number) {
  if (given == Py_None) return 1;
  if (!PyFloat_Check(given)) return 0;
  *number = (float)PyFloat_AS_DOUBLE(given);
  return 1;
}

static PyObject* raise_of_driver(int status) {
  return PyErr_Format(PyExc_RuntimeError,
                      "cuLaunchKernelEx failed with error %d of the CUDA driver", -status);
}

/* (stream, rows, eps, scale, x, residual, weight, bias, norm, hidden state, reduced, rstd) */
static PyObject* call_site(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Entry* entry = (Entry*)PyCapsule_GetPointer(self, kCapsule);
  if (entry == 0) return 0;
  const Site* site = entry->site;
  int status = kOtherCall;
  float eps = site->eps, scale = site->scale;
  if (count == 12 && site->call_count != 0 && PyLong_Check(given[0]) && PyLong_Check(given[1]) &&
      (number_of(given[2], &eps) || site->takes_eps_pointer) && number_of(given[3], &scale)) {
    const int known = PyDict_Contains(entry->groups, (PyObject*)site->group);
    if (known < 0) return 0;
    if (known) {
      const uint64_t stream = PyLong_AsUnsignedLongLong(given[0]);
      const int64_t rows = PyLong_AsLongLong(given[1]);
      char* arrays[kArrays] = {0};
      if (PyErr_Occurred()) return 0;
      for (int i = 0; i < kInputs; ++i)
        if (address_of(given[4 + i], &arrays[i]) != 0) return 0;
      if (!PyFloat_Check(given[2]) && address_of(given[2], &arrays[kEps]) != 0) return 0;
      for (int i = 0; i < kInputs; ++i)
        if (address_of(given[8 + i], &arrays[kScale + 1 + i]) != 0) return 0;
      status = fx_fusion_launch(site, stream, rows, eps, scale, arrays);
    }
  }
  if (status == kLaunched) Py_RETURN_NONE;
  if (status < 0) return raise_of_driver(status);
  return PyObject_Vectorcall(entry->slow, given, count, 0);
}

static PyMethodDef method = {
    "site", (PyCFunction)(void (*)(void))call_site, METH_FASTCALL,
    "Run one site of generated code; see fx_fusion.lowering.gpu_site."};

/* A callable for a site; Python calls this through ctypes.PyDLL. */
PyObject* fx_fusion_bind(Site* site, PyObject* slow, PyObject* groups) {
  if (data_ptr_name == 0) data_ptr_name = PyUnicode_InternFromString("data_ptr");
  if (data_ptr_name == 0) return 0;
  Entry* entry = (Entry*)PyMem_Malloc(sizeof(Entry));
  if (entry == 0) return PyErr_NoMemory();
  entry->site = site;
  entry->slow = Py_NewRef(slow);
  entry->groups = Py_NewRef(groups);
  PyObject* capsule = PyCapsule_New(entry, kCapsule, release);
  if (capsule == 0) return 0;
  PyObject* callable = PyCFunction_New(&method, capsule);
  Py_DECREF(capsule);
  return callable;
}

#include "cpp_entry.h"
#endif
