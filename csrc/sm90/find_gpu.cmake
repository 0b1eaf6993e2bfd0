# Is there a Hopper GPU in this machine? Sets te_mx_no_hopper to the reason why not, or to nothing. The first program
# that answers decides: the driver's own, or one that comes with nvcc, for containers without the former.
find_program(te_mx_device_query __nvcc_device_query HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
             PATH_SUFFIXES bin)
mark_as_advanced(te_mx_device_query)

set(te_mx_no_hopper "no Hopper GPU was found here; TE_MX_CUDA=ON builds them without one")
foreach(te_mx_query "nvidia-smi;--query-gpu=compute_cap;--format=csv,noheader" "${te_mx_device_query}")
  execute_process(COMMAND ${te_mx_query} TIMEOUT 60 RESULT_VARIABLE te_mx_query_status
                  OUTPUT_VARIABLE te_mx_capabilities ERROR_QUIET)
  if(te_mx_query_status EQUAL 0)
    if(te_mx_capabilities MATCHES "(^|[^0-9.])9\\.?0([^0-9]|$)")  # 9.0 a line, or 90 among commas
      set(te_mx_no_hopper "")
    endif()
    break()
  endif()
endforeach()
