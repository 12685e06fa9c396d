# The CUDA module, where a compiler is found or demanded (JAXFLASH_CUDA).

set(JAXFLASH_CUDA_OLDEST 12.8)  # the first to know sm_100 and sm_120
set(JAXFLASH_CUDA_HELP
  "Two ways to get a compiler:
  1. A CUDA toolkit, ${JAXFLASH_CUDA_OLDEST} or newer (13.0 is the one tested), with nvcc on the PATH, or
       export CUDACXX=/usr/local/cuda/bin/nvcc
  2. nvcc from PyPI:
       pip install nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \\
                   nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*
       prefix=$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')/nvidia/cu13
       export CUDACXX=$prefix/bin/nvcc NVCC_APPEND_FLAGS=-L$prefix/lib
or build without CUDA: JAXFLASH_CUDA=OFF")

# Sets `reason` to why CUDA can't be built, or to nothing.
function(jaxflash_find_cuda reason)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # a build folder that found none once looks again
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(${reason} "no CUDA compiler found" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE version ERROR_QUIET)
  string(REGEX MATCH "release ([0-9.]+)" ignored "${version}")
  if(CMAKE_MATCH_1 VERSION_LESS JAXFLASH_CUDA_OLDEST)
    set(${reason} "${CMAKE_CUDA_COMPILER} is CUDA ${CMAKE_MATCH_1}, older than ${JAXFLASH_CUDA_OLDEST}" PARENT_SCOPE)
    return()
  endif()
  set(${reason} "" PARENT_SCOPE)
endfunction()

string(TOUPPER "${JAXFLASH_CUDA}" JAXFLASH_CUDA)
if(NOT JAXFLASH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "JAXFLASH_CUDA must be AUTO, ON or OFF; got '${JAXFLASH_CUDA}'.")
elseif(JAXFLASH_CUDA STREQUAL "OFF")
  message(STATUS "CUDA module: off (JAXFLASH_CUDA=OFF)")
  return()
endif()

jaxflash_find_cuda(reason)
if(reason AND JAXFLASH_CUDA STREQUAL "ON")
  message(FATAL_ERROR "JAXFLASH_CUDA=ON, but ${reason}.\n${JAXFLASH_CUDA_HELP}")
elseif(reason)
  message(STATUS "CUDA module: off (${reason}; JAXFLASH_CUDA=ON tells how to get one)")
  return()
endif()

# Machine code for each major version since Ampere, and PTX that newer ones can compile.
# Set before enable_language, which would choose a single architecture.
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100-real;120-real;80-virtual")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
message(STATUS "CUDA module: on (${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_ARCHITECTURES})")

# Launchers and kernels: no Python, no XLA. The runtime is linked statically (CMake's default), so that the module
# imports on machines without CUDA.
include(cpp/cuda/sm80/kernels.cmake)
include(cpp/cuda/sm90/kernels.cmake)
jaxflash_sm80_kernels("${CMAKE_BINARY_DIR}/generated" kernel_sources)
add_library(jaxflash_cuda STATIC cpp/cuda/common/build_facts.cu cpp/cuda/dispatch.cu ${kernel_sources})
target_link_libraries(jaxflash_cuda PUBLIC jaxflash_options)
target_include_directories(jaxflash_cuda PRIVATE "${CMAKE_BINARY_DIR}/generated")
# Register and spill counts of every kernel in the build log: tools/check_ptxas.py reads them.
target_compile_options(jaxflash_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)

# Hopper's own kernels, for its own architecture and no other.
jaxflash_has_sm90("${CMAKE_CUDA_ARCHITECTURES}" has_sm90)
if(NOT JAXFLASH_HOPPER)
  set(has_sm90 OFF)
endif()
jaxflash_sm90_kernels("${CMAKE_BINARY_DIR}/generated" ${has_sm90} sm90_sources)
set(architectures ${CMAKE_CUDA_ARCHITECTURES})
if(has_sm90)
  list(APPEND architectures 90a-real)
  list(REMOVE_DUPLICATES architectures)
  add_library(jaxflash_cuda_sm90 OBJECT cpp/cuda/sm90/tensor_map.cu ${sm90_sources})
  set_target_properties(jaxflash_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_link_libraries(jaxflash_cuda_sm90 PUBLIC jaxflash_options)
  target_compile_options(jaxflash_cuda_sm90 PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  target_sources(jaxflash_cuda PRIVATE $<TARGET_OBJECTS:jaxflash_cuda_sm90>)
endif()
list(JOIN architectures " " architectures)
target_compile_definitions(jaxflash_cuda PRIVATE JAXFLASH_CUDA_ARCHITECTURES="${architectures}")

add_library(jaxflash_cuda_handlers STATIC cpp/ffi/cuda_handlers.cc cpp/ffi/decode.cc)
target_link_libraries(jaxflash_cuda_handlers PUBLIC jaxflash_cuda xla_ffi)

jaxflash_python_module(_cuda cpp/bindings/cuda.cc)
target_link_libraries(_cuda PRIVATE jaxflash_cuda_handlers)

if(JAXFLASH_NATIVE_TESTS)
  add_executable(cuda_test tests/native/cuda_test.cu)
  target_link_libraries(cuda_test PRIVATE jaxflash_cuda jaxflash_cpu Threads::Threads)
endif()
