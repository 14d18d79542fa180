// What libcuda.so.1 and libnvrtc.so are to gradwire, without a GPU: the same C functions, which launch on the emulator
// and fail where the environment tells them to (GW_STUB_<what>). It also keeps count of contexts that were not given
// back.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

namespace {

int number(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == 0 ? otherwise : std::atoi(text);
}

char context, module_of, program;
int n_contexts = 0, n_compilations = 0;
std::string target;
std::set<std::string> names;  // of functions that were asked for

}  // namespace

extern "C" {

int cuInit(unsigned) { return number("GW_STUB_INIT", 0); }
int cuDriverGetVersion(int* version) { return *version = number("GW_STUB_DRIVER", 13000), 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int which, int) {
  const int architecture = number("GW_STUB_ARCHITECTURE", 90);
  *value = which == 75 ? architecture / 10 : which == 76 ? architecture % 10 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** out, int) { return *out = &context, 0; }
int cuCtxPushCurrent_v2(void* pushed) { return pushed == &context ? (++n_contexts, 0) : 201; }
int cuCtxPopCurrent_v2(void**) { return --n_contexts, 0; }
int stub_contexts() { return n_contexts; }
int stub_compilations() { return n_compilations; }

int cuModuleLoadData(void** out, const void* image) {
  if (n_contexts != 1) return 201;
  if (std::memcmp(image, "compiled", 8) != 0) return 200;
  return *out = &module_of, number("GW_STUB_LOAD", 0);
}
int cuModuleGetFunction(void** out, void* module, const char* name) {
  if (module != &module_of) return 400;
  if (std::string(name).rfind("gw_", 0) != 0) return 500;
  *out = const_cast<std::string*>(&*names.insert(name).first);
  return 0;
}
int cuFuncGetAttribute(int* value, int which, void*) { return *value = which == 4 ? 40 : 0, 0; }
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
  if (n_contexts != 1 || y * z * threads_y * threads_z != 1 || stream != reinterpret_cast<void*>(0x1234) || extra)
    return 1;
  if (const int status = number("GW_STUB_LAUNCH", 0)) return status;
  void* const library = dlopen(std::getenv("GW_STUB_EMULATOR"), RTLD_NOW);
  using Emulate = int (*)(const char*, unsigned, unsigned, unsigned, unsigned long long, const void*);
  const auto emulate = reinterpret_cast<Emulate>(dlsym(library, "gw_emulate"));
  return emulate(static_cast<std::string*>(function)->c_str(), x, threads, shared_bytes, 0, parameters[0]) ? 719 : 0;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == 100 ? "no CUDA-capable device is detected" : status == 2 ? "out of memory" : "another error";
  return 0;
}

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int* n) { return *n = 3, 0; }
int nvrtcGetSupportedArchs(int* out) { return out[0] = 75, out[1] = 80, out[2] = 90, 0; }
int nvrtcCreateProgram(void** out, const char* source, const char*, int n_headers, const char** texts,
                       const char** headers) {
  for (int i = 0; i < n_headers; ++i)
    if (std::strstr(headers[i], ".hpp") == nullptr || std::strstr(texts[i], "#pragma once") == nullptr) return 3;
  return *out = &program, std::strstr(source, "#include") == nullptr ? 3 : 0;
}
int nvrtcCompileProgram(void*, int n, const char** options) {
  for (int i = 0; i < n; ++i)
    if (std::strncmp(options[i], "--gpu-architecture=", 19) == 0) target = options[i] + 19;
  return ++n_compilations, number("GW_STUB_COMPILE", 0);
}
int nvrtcGetCUBINSize(void*, std::size_t* n) { return *n = 32, target.rfind("sm_", 0) == 0 ? 0 : 5; }
int nvrtcGetCUBIN(void*, char* out) { return std::strcpy(out, ("compiled " + target).c_str()), 0; }
int nvrtcGetPTXSize(void*, std::size_t* n) { return *n = 32, 0; }
int nvrtcGetPTX(void*, char* out) { return std::strcpy(out, ("compiled " + target).c_str()), 0; }
int nvrtcGetProgramLogSize(void*, std::size_t* n) { return *n = 16, 0; }
int nvrtcGetProgramLog(void*, char* out) { return std::strcpy(out, "line 3: wrong"), 0; }
int nvrtcDestroyProgram(void**) { return 0; }
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR"; }
}
