// The wheel of the CUDA runtime refers to this header of nvcc and does not have it. These are the
// attributes that the runtime's own headers use, as a host compiler that is not nvcc sees them.
#pragma once

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __no_return__ __attribute__((noreturn))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(a)
#define __specialization_static
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_EXCLUDE
