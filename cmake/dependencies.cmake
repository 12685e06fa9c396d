# Build-time dependencies that come as Python packages, found through the interpreter of this build.

# Runs a line of Python; fails with `hint` where that fails.
function(jaxflash_ask_python result code hint)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "${code}"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${Python_EXECUTABLE}: ${hint}\n"
      "`pip install .` brings what the build needs; plain cmake needs -DPython_EXECUTABLE=<a Python that has it>.")
  endif()
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()

jaxflash_ask_python(nanobind_ROOT "import nanobind; print(nanobind.cmake_dir())"
  "nanobind is not installed (pip install nanobind).")
find_package(nanobind CONFIG REQUIRED)

# Without importing jaxlib, whose start-up a build has no use for.
jaxflash_ask_python(jaxlib_root
  "from importlib.util import find_spec; print(find_spec('jaxlib').submodule_search_locations[0])"
  "jaxlib, which ships the XLA FFI headers, is not installed (pip install jaxlib==0.10.2).")
set(XLA_FFI_HEADER "${jaxlib_root}/include/xla/ffi/api/c_api.h")
if(NOT EXISTS "${XLA_FFI_HEADER}")
  message(FATAL_ERROR "jaxlib in ${jaxlib_root} has no XLA FFI headers: ${XLA_FFI_HEADER} does not exist.")
endif()

# Runtimes refuse a handler built on headers newer than theirs.
file(STRINGS "${XLA_FFI_HEADER}" xla_ffi_minor REGEX "^#define XLA_FFI_API_MINOR ")
string(REGEX REPLACE "[^0-9]" "" xla_ffi_minor "${xla_ffi_minor}")
if(xla_ffi_minor GREATER 3)
  message(WARNING "The XLA FFI headers in ${jaxlib_root} are 0.${xla_ffi_minor}: this build will not load with a "
    "jaxlib as old as 0.10.2 (0.3). `pip install .` builds with the headers of 0.10.2.")
endif()

add_library(xla_ffi INTERFACE)
target_include_directories(xla_ffi SYSTEM INTERFACE "${jaxlib_root}/include")
