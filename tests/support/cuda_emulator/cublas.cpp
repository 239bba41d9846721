// cuBLAS and cuBLASLt, as far as torch calls them: computations are counted as one kernel each.
//
// cublas_v2.h is not included: routines are defined by what they have in common, which is that the
// handle is their first argument; C's calling convention lets a function ignore the others.
#include "emulator.h"

#include <cstring>

using namespace emulated;

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
};

int status_of(cudaError_t error) {
  constexpr int EXECUTION_FAILED = 13;
  return error == cudaSuccess ? 0 : EXECUTION_FAILED;
}

}  // namespace

// ---- Computations ------------------------------------------------------------------------------

// clang-format off
#define FOR_EACH_TYPE(routine, suffix) \
  routine(cublasS##suffix) routine(cublasD##suffix) routine(cublasC##suffix) routine(cublasZ##suffix)

#define ROUTINES(routine) \
  FOR_EACH_TYPE(routine, gemm_v2) \
  FOR_EACH_TYPE(routine, gemmStridedBatched) \
  FOR_EACH_TYPE(routine, gemv_v2) \
  FOR_EACH_TYPE(routine, trsm_v2) \
  FOR_EACH_TYPE(routine, trsmBatched) \
  FOR_EACH_TYPE(routine, gelsBatched) \
  FOR_EACH_TYPE(routine, geqrfBatched) \
  FOR_EACH_TYPE(routine, getrfBatched) \
  FOR_EACH_TYPE(routine, getrsBatched) \
  routine(cublasSdot_v2) routine(cublasDdot_v2) \
  routine(cublasCdotc_v2) routine(cublasCdotu_v2) \
  routine(cublasZdotc_v2) routine(cublasZdotu_v2) \
  routine(cublasDotEx) routine(cublasGemmEx) routine(cublasSgemmEx) \
  routine(cublasGemmStridedBatchedEx)
// clang-format on

#define DEFINE_ROUTINE(name)                          \
  EXPORT int name(Handle* handle) {                   \
    static Kernel* const kernel = new_kernel(#name);  \
    return status_of(launch(handle->stream, kernel)); \
  }

ROUTINES(DEFINE_ROUTINE)

// torch passes the same handle to cuBLASLt, but the stream counts that is the last argument.
EXPORT int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                          void*, void*, void*, void*, size_t, cudaStream_t stream) {
  static Kernel* const kernel = new_kernel("cublasLtMatmul");
  return status_of(launch(stream, kernel));
}

// ---- Handles and settings ----------------------------------------------------------------------

EXPORT int cublasCreate_v2(Handle** handle) {
  *handle = new Handle();
  return 0;
}

EXPORT int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}

EXPORT int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}

EXPORT int cublasGetMathMode(Handle*, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasGetPointerMode_v2(Handle*, int* mode) {
  *mode = 0;
  return 0;
}

// One algorithm is found, whose description, of all zeros, nothing reads.
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                          void* results, int* found) {
  constexpr size_t RESULT_BYTES = 64;  // of the part that torch looks at
  memset(results, 0, RESULT_BYTES);
  *found = 1;
  return 0;
}

#define SUCCEED(name) \
  EXPORT int name() { return 0; }

SUCCEED(cublasSetMathMode)
SUCCEED(cublasSetPointerMode_v2)
SUCCEED(cublasSetWorkspace_v2)
SUCCEED(cublasLtGetVersion)
SUCCEED(cublasLtMatmulDescCreate)
SUCCEED(cublasLtMatmulDescDestroy)
SUCCEED(cublasLtMatmulDescSetAttribute)
SUCCEED(cublasLtMatmulPreferenceCreate)
SUCCEED(cublasLtMatmulPreferenceDestroy)
SUCCEED(cublasLtMatmulPreferenceSetAttribute)
SUCCEED(cublasLtMatrixLayoutCreate)
SUCCEED(cublasLtMatrixLayoutDestroy)
SUCCEED(cublasLtMatrixLayoutSetAttribute)
