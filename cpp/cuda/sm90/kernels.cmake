# The Hopper kernels there are: one list for instantiations and dispatch.
#
# An entry is (dtype tag, padded head dim, padded value dim, reach), forward only. The largest is the fallback of all
# that are smaller, so any two dims up to 256 find one.
set(JAXFLASH_SM90_KERNELS "")
foreach(T IN ITEMS BF16 F16)
  foreach(TILE IN ITEMS "64 64 kLong" "96 96 kLong" "128 128 kShort" "128 128 kLong" "192 128 kLong" "192 192 kLong"
                        "256 256 kLong")
    list(APPEND JAXFLASH_SM90_KERNELS "${T} ${TILE}")
  endforeach()
endforeach()

# Whether the architectures asked for include Hopper, whose kernels need compute_90a.
function(jaxflash_has_sm90 architectures result)
  set(${result} OFF PARENT_SCOPE)
  foreach(architecture IN LISTS architectures)
    if(architecture MATCHES "^90a?(-real|-virtual)?$")
      set(${result} ON PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

# Writes kernels.inc, empty where `enabled` is off, and one source file a kernel to `folder`; their names to `sources`.
function(jaxflash_sm90_kernels folder enabled sources)
  set(list "")
  set(files "")
  if(enabled)
    foreach(kernel IN LISTS JAXFLASH_SM90_KERNELS)
      string(REPLACE " " ";" parts "${kernel}")
      list(GET parts 0 T)
      list(GET parts 1 D)
      list(GET parts 2 V)
      list(GET parts 3 REACH)
      string(APPEND list "JAXFLASH_KERNEL(${T}, ${D}, ${V}, ${REACH})\n")
      set(file "${folder}/cuda/sm90/forward_${T}_${D}_${V}_${REACH}.cu")
      configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/forward.cu.in" "${file}" @ONLY)
      list(APPEND files "${file}")
    endforeach()
  endif()
  file(CONFIGURE OUTPUT "${folder}/cuda/sm90/kernels.inc" CONTENT "${list}" @ONLY)
  set(${sources} "${files}" PARENT_SCOPE)
endfunction()
