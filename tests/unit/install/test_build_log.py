"""What went wrong is found in the output of a failed build."""

from __future__ import annotations

from raytrain_plus.install.build_log import SHOWN, error_lines

CMAKE = """  -- Found Pytorch: 2.13.0+cu130
  CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake:230 (message):
    Could NOT find CUDAToolkit (missing: CUDAToolkit_INCLUDE_DIR
    CUDAToolkit_NVCC_EXECUTABLE)

  Call Stack (most recent call first):
  -- Configuring incomplete, errors occurred!
  error: subprocess-exited-with-error
ERROR: Failed building wheel for horovod
"""


def test_a_message_of_cmake_is_shown_whole_and_pips_wrapping_is_not() -> None:
    assert error_lines(CMAKE) == [
        "  CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake:230 (message):",
        "    Could NOT find CUDAToolkit (missing: CUDAToolkit_INCLUDE_DIR",
        "    CUDAToolkit_NVCC_EXECUTABLE)",
    ]


def test_errors_of_the_compiler_come_first_and_without_any_the_end_is_shown() -> None:
    compiled = "".join(f"x.cc:{line}:1: error: no\n" for line in range(100))
    assert error_lines(f"g++ -c x.cc\n{compiled}")[0] == "x.cc:0:1: error: no"
    assert len(error_lines(compiled)) == SHOWN
    assert error_lines("one\ntwo") == ["one", "two"]
