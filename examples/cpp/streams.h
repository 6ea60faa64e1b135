// The standard streams of a program, which may be closed or full.
#pragma once

#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

// Throws if stdout is closed. Opens /dev/null in place of other closed streams: a file that is
// opened later would take the number of the stream, and then its output.
inline void require_stdout() {
  const bool closed = fcntl(STDOUT_FILENO, F_GETFD) < 0;
  int handle = open("/dev/null", O_RDWR);
  while (handle >= 0 && handle <= STDERR_FILENO) handle = open("/dev/null", O_RDWR);
  close(handle);
  TORCH_CHECK_VALUE(!closed,
                    "stdout must be open, got a closed stdout; to drop the output, use >/dev/null");
}

// Throws if stdout could not take all of the output.
inline void require_written() {
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.flush();
  TORCH_CHECK_VALUE(written, "stdout must take all of the output, got an error; is the disk full?");
}
