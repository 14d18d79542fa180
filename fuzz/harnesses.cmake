# The harnesses: LLVMFuzzerTestOneInput in NAME.cpp, run by clang's libFuzzer where the compiler has it (fuzz_NAME), and
# always by a driver of our own (drive_NAME), which makes inputs from a seed and writes seeds for the other one.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS -fsanitize=fuzzer)
check_cxx_source_compiles("#include <cstddef>
#include <cstdint>
extern \"C\" int LLVMFuzzerTestOneInput(const std::uint8_t*, std::size_t) { return 0; }" GRADWIRE_HAS_LIBFUZZER)
unset(CMAKE_REQUIRED_FLAGS)
if(GRADWIRE_SANITIZE STREQUAL "thread")
  set(GRADWIRE_HAS_LIBFUZZER OFF)  # threads share its counters without locks: ThreadSanitizer would report each one
endif()
if(GRADWIRE_HAS_LIBFUZZER)
  target_compile_options(gradwire_core PUBLIC -fsanitize=fuzzer-no-link)
endif()

add_custom_target(fuzzers)
function(add_harness name driver)
  add_executable(drive_${name} EXCLUDE_FROM_ALL fuzz/${name}.cpp fuzz/${driver}.cpp)
  target_link_libraries(drive_${name} PRIVATE gradwire_core)
  add_dependencies(fuzzers drive_${name})
  if(GRADWIRE_HAS_LIBFUZZER)
    add_executable(fuzz_${name} EXCLUDE_FROM_ALL fuzz/${name}.cpp)
    target_link_libraries(fuzz_${name} PRIVATE gradwire_core)
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
    add_dependencies(fuzzers fuzz_${name})
  endif()
endfunction()

add_harness(gcomp_decode drive_gcomp)
add_harness(switch_packets drive_gcomp)
add_harness(float_decode drive_floats)
add_harness(quantised_decode drive_quantised)
add_harness(sums_decode drive_sums)
add_harness(handshake drive_handshake)
add_harness(conversation drive_conversation)
