# Is there an nvcc that can build the Hopper kernels? Sets CMAKE_CUDA_COMPILER, or te_mx_no_hopper to the reason why
# not. enable_language(CUDA) cannot be asked: it stops the configuration when nvcc is missing or broken.
include(CheckLanguage)

set(te_mx_no_hopper "")
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # nvcc may have been installed since the last configuration
  # The toolkit's own folder is usually not on PATH.
  if(NOT DEFINED ENV{CUDACXX})
    find_program(te_mx_nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(te_mx_nvcc)
      set(ENV{CUDACXX} "${te_mx_nvcc}")
    endif()
  endif()
  if(DEFINED ENV{CUDACXX})
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      set(te_mx_no_hopper "$ENV{CUDACXX} does not work here")
    endif()
  else()
    set(te_mx_no_hopper "nvcc was not found")
  endif()
endif()

# One small kernel with every header of the tile library: an nvcc too old for sm_90a, for C++20 or for this machine's
# host compiler fails here. Asked once for each nvcc.
if(NOT te_mx_no_hopper AND NOT te_mx_nvcc_probed STREQUAL CMAKE_CUDA_COMPILER)
  set(te_mx_probe "${CMAKE_BINARY_DIR}/nvcc_probe")
  file(WRITE "${te_mx_probe}.cu" "
#include <mxtile/sm90/fp8.cuh>
#include <mxtile/sm90/swizzle.cuh>
#include <mxtile/sm90/tensor_map.h>
#include <mxtile/sm90/tma.cuh>
#include <mxtile/sm90/wgmma.cuh>
template <class T> concept Small = sizeof(T) <= 4;
template <Small T> __global__ void probe(T* x) { *x += 1; }
template __global__ void probe<int>(int*);
")
  execute_process(
    COMMAND "${CMAKE_CUDA_COMPILER}" -std=c++20 -gencode=arch=compute_90a,code=sm_90a -Xcompiler=-fPIC
            --expt-relaxed-constexpr -I "${CMAKE_CURRENT_LIST_DIR}/../../third_party/mxtile/include"
            -c "${te_mx_probe}.cu" -o "${te_mx_probe}.o"
    RESULT_VARIABLE te_mx_probe_status OUTPUT_VARIABLE te_mx_probe_log ERROR_VARIABLE te_mx_probe_log)
  if(te_mx_probe_status EQUAL 0)
    set(te_mx_nvcc_probed "${CMAKE_CUDA_COMPILER}" CACHE INTERNAL "nvcc that builds the Hopper kernels")
  else()
    string(STRIP "${te_mx_probe_log}" te_mx_probe_log)
    string(REGEX REPLACE "\n.*" "" te_mx_probe_log "${te_mx_probe_log}")
    set(te_mx_no_hopper "${CMAKE_CUDA_COMPILER} cannot compile for sm_90a in C++20: ${te_mx_probe_log}")
  endif()
endif()

if(NOT te_mx_no_hopper)
  find_package(CUDAToolkit QUIET)
  if(NOT TARGET CUDA::cudart_static)
    set(te_mx_no_hopper "the static CUDA runtime of ${CMAKE_CUDA_COMPILER} was not found")
  endif()
endif()
