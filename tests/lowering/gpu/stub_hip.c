// hipRTC and the HIP runtime as far as the launch code calls them, without a GPU. Every call is
// written down as a line of text.
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static char written[1 << 16];
static int failing;  // what the next call that can fail returns

static int note(const char* format, ...) {
  const size_t used = strlen(written);
  va_list given;
  va_start(given, format);
  vsnprintf(written + used, sizeof written - used, format, given);
  va_end(given);
  const int status = failing;
  failing = 0;
  return status;
}

const char* stub_written(void) { return written; }
void stub_reset(int next_status) {
  written[0] = 0;
  failing = next_status;
}

int hiprtcVersion(int* major, int* minor) { return *major = 7, *minor = 1, 0; }
int hiprtcCreateProgram(void** program, const char* source, const char* name, int count,
                        const char** headers, const char** names) {
  *program = (void*)0x77;
  note("create %s %d", name, strstr(source, "KERNEL void") != NULL);
  for (int i = 0; i < count; ++i) note(" %s=%zu", names[i], strlen(headers[i]));
  return note("\n");
}
int hiprtcCompileProgram(void* program, int count, const char** options) {
  note("compile %p", program);
  for (int i = 0; i < count; ++i) note(" %s", options[i]);
  return note("\n");
}
int hiprtcGetProgramLogSize(void* program, size_t* size) { return *size = 10, 0; }
int hiprtcGetProgramLog(void* program, char* log) { return memcpy(log, "no such x", 10), 0; }
int hiprtcGetCodeSize(void* program, size_t* size) { return *size = 4, 0; }
int hiprtcGetCode(void* program, char* code) { return memcpy(code, "co\0e", 4), 0; }
int hiprtcDestroyProgram(void** program) { return note("destroy %p\n", *program); }

const char* hipGetErrorString(int status) { return status == 98 ? "invalid function" : "other"; }
int hipGetDevice(int* device) { return *device = 3, 0; }
int hipStreamIsCapturing(void* stream, int* status) {
  return *status = stream == (void*)0x5, note("capturing? %p\n", stream);
}
int hipThreadExchangeStreamCaptureMode(int* mode) {
  note("mode %d\n", *mode);
  return *mode = *mode == 2 ? 0 : 2, 0;
}
int hipModuleLoadData(void** module, const void* code) {
  return *module = (void*)0x11, note("load %.4s\n", (const char*)code);
}
int hipModuleGetFunction(void** function, void* module, const char* name) {
  return *function = (void*)0x22, note("function %p %s\n", module, name);
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads,
                                                       size_t bytes) {
  return *blocks = 2, note("occupancy %p %d %zu\n", function, threads, bytes);
}
int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned bytes,
                          void* stream, void** parameters, void** extra) {
  return note("launch %p %u %u %u, %u %u %u, %u %p %d %p\n", function, grid_x, grid_y, grid_z,
              block_x, block_y, block_z, bytes, stream, *(int*)parameters[0], (void*)extra);
}
