# The CPU module. One kernel source is compiled once an instruction set; dispatch.cc picks at run time.

set(JAXFLASH_INSTRUCTION_SETS baseline)  # plain x86-64; NEON on aarch64
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND JAXFLASH_INSTRUCTION_SETS avx2 avx512)
endif()
set(JAXFLASH_FLAGS_baseline "")
set(JAXFLASH_FLAGS_avx2 -mavx2 -mfma)
set(JAXFLASH_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512)

# Launcher and kernels: no Python, no XLA, so that C++ programs can call them.
add_library(jaxflash_cpu STATIC cpp/cpu/dispatch.cc cpp/cpu/executor.cc)
target_link_libraries(jaxflash_cpu PUBLIC jaxflash_options)
foreach(isa IN LISTS JAXFLASH_INSTRUCTION_SETS)
  string(TOUPPER ${isa} isa_upper)
  add_library(jaxflash_cpu_${isa} OBJECT cpp/cpu/kernels.cc)
  target_link_libraries(jaxflash_cpu_${isa} PRIVATE jaxflash_options)
  target_compile_definitions(jaxflash_cpu_${isa} PRIVATE JAXFLASH_ISA=${isa})
  # No -ffast-math: -inf and NaN mean something here; errno and floating-point traps do not. How vectors are passed
  # between translation units (-Wpsabi) is of no concern: none are.
  target_compile_options(jaxflash_cpu_${isa} PRIVATE
    ${JAXFLASH_FLAGS_${isa}} -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wno-psabi)
  target_sources(jaxflash_cpu PRIVATE $<TARGET_OBJECTS:jaxflash_cpu_${isa}>)
  target_compile_definitions(jaxflash_cpu PUBLIC JAXFLASH_HAS_${isa_upper})
endforeach()

jaxflash_python_module(_cpu cpp/bindings/cpu.cc cpp/ffi/cpu_handlers.cc cpp/ffi/decode.cc)
target_link_libraries(_cpu PRIVATE jaxflash_cpu xla_ffi)

if(JAXFLASH_NATIVE_TESTS)
  find_package(Threads REQUIRED)
  add_executable(kernels_test tests/native/kernels_test.cc)
  target_link_libraries(kernels_test PRIVATE jaxflash_cpu Threads::Threads)
endif()
