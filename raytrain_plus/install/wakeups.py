"""Edits of Horovod's source by which its threads wait to be woken, instead of looking again a thousand times a second.

Stock Horovod sleeps 1 ms and then exchanges bit vectors with all members, whether there is anything to sum or not. The
caller of `synchronize` asks again and again. Together they used more than half a core in each worker that only waited,
and every sum waited for the end of a sleep.
"""

from __future__ import annotations

from raytrain_plus.install.edit import Edit

_OPERATIONS = "horovod/common/operations.cc"
_QUEUE = "horovod/common/tensor_queue.cc"
_QUEUE_HEADER = "horovod/common/tensor_queue.h"
_HANDLES = "horovod/torch/handle_manager.cc"
_HANDLES_HEADER = "horovod/torch/handle_manager.h"
_TORCH = "horovod/torch/mpi_ops_v2.cc"

WAKEUPS: tuple[Edit, ...] = (
    Edit(
        name="wait-for-tensors",
        file=_OPERATIONS,
        reason="the background thread sleeps 1 ms between two rounds of negotiation, and starts a round although there "
        "is nothing to sum; begin one at once when a tensor is there, and else ten times a second, because another "
        "member may wait in a round",
        old="""  auto start_time = std::chrono::steady_clock::now();
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
""",
        new="""  state.process_set_table.Get(0).tensor_queue.WaitForTensors(
      std::chrono::milliseconds(100), state.shut_down);
""",
    ),
    Edit(
        name="wake-at-shutdown",
        file=_OPERATIONS,
        reason="part of 'wait-for-tensors': a shutdown must not wait for the next round",
        old="""    horovod_global.shut_down = true;
    horovod_global.background_thread.join();
""",
        new="""    horovod_global.shut_down = true;
    horovod_global.process_set_table.Get(0).tensor_queue.Wake();
    horovod_global.background_thread.join();
""",
    ),
    Edit(
        name="wait-for-tensors-declared",
        file=_QUEUE_HEADER,
        reason="part of 'wait-for-tensors'",
        old="""  void RemoveJoinTensor();

protected:
""",
        new="""  void RemoveJoinTensor();

  // Returns once there is a tensor, or `ended` is set and `Wake` called, or the limit is over.
  void WaitForTensors(std::chrono::milliseconds limit, const std::atomic_bool& ended);

  void Wake();

protected:
  std::condition_variable added_;
""",
    ),
    Edit(
        name="wait-for-tensors-included",
        file=_QUEUE_HEADER,
        reason="part of 'wait-for-tensors'",
        old="""#include <iostream>
#include <mutex>
""",
        new="""#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iostream>
#include <mutex>
""",
    ),
    Edit(
        name="wait-for-tensors-defined",
        file=_QUEUE,
        reason="part of 'wait-for-tensors'; a tensor is in the table until its sum begins",
        old="""// Execute callback for each tensor and clear tensor queue
""",
        new="""void TensorQueue::WaitForTensors(std::chrono::milliseconds limit,
                                 const std::atomic_bool& ended) {
  std::unique_lock<std::mutex> guard(mutex_);
  added_.wait_for(guard, limit, [&] { return !tensor_table_.empty() || ended; });
}

void TensorQueue::Wake() {
  // Taken, so that the waiting thread is not between its look at the flag and its wait.
  std::lock_guard<std::mutex> guard(mutex_);
  added_.notify_all();
}

// Execute callback for each tensor and clear tensor queue
""",
    ),
    Edit(
        name="wake-with-a-tensor",
        file=_QUEUE,
        reason="part of 'wait-for-tensors': operations other than reductions add one tensor",
        old="""  tensor_table_.emplace(e.tensor_name, std::move(e));
  message_queue_.push(std::move(message));
""",
        new="""  tensor_table_.emplace(e.tensor_name, std::move(e));
  message_queue_.push(std::move(message));
  added_.notify_all();
""",
    ),
    Edit(
        name="wake-with-tensors",
        file=_QUEUE,
        reason="part of 'wait-for-tensors': reductions",
        old="""    message_queue_.push(std::move(messages[i]));
  }
""",
        new="""    message_queue_.push(std::move(messages[i]));
  }
  added_.notify_all();
""",
    ),
    Edit(
        name="wait-for-a-handle",
        file=_TORCH,
        reason="an operation can only be polled, or waited for without a limit; wait with a limit, so that the caller "
        "sees an interrupt, and nothing runs meanwhile",
        old="""int PollHandle(int handle) { return handle_manager.PollHandle(handle) ? 1 : 0; }
""",
        new="""int PollHandle(int handle) { return handle_manager.PollHandle(handle) ? 1 : 0; }

bool WaitHandle(int handle, double seconds) {
  py::gil_scoped_release release_python_gil;
  return handle_manager.WaitHandle(handle, seconds);
}
""",
    ),
    Edit(
        name="wait-for-a-handle-exported",
        file=_TORCH,
        reason="part of 'wait-for-a-handle'",
        old="""  m.def("horovod_torch_poll", &PollHandle);
""",
        new="""  m.def("horovod_torch_poll", &PollHandle);
  m.def("horovod_torch_wait", &WaitHandle);
""",
    ),
    Edit(
        name="wait-for-a-handle-declared",
        file=_HANDLES_HEADER,
        reason="part of 'wait-for-a-handle'",
        old="""  void Reset();

private:
""",
        new="""  void Reset();
  // Returns whether the operation has ended, after at most so many seconds.
  bool WaitHandle(int handle, double seconds);

private:
  std::condition_variable done_;
""",
    ),
    Edit(
        name="wait-for-a-handle-included",
        file=_HANDLES_HEADER,
        reason="part of 'wait-for-a-handle'",
        old="""#include <atomic>
#include <memory>
""",
        new="""#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
""",
    ),
    Edit(
        name="wait-for-a-handle-defined",
        file=_HANDLES,
        reason="part of 'wait-for-a-handle'",
        old="""std::shared_ptr<Status> HandleManager::ReleaseHandle(int handle) {
""",
        new="""bool HandleManager::WaitHandle(int handle, double seconds) {
  std::unique_lock<std::mutex> guard(mutex_);
  auto ended = [&] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  };
  bool in_time = done_.wait_for(guard, std::chrono::duration<double>(seconds), ended);
  if (results_.find(handle) == results_.end()) {
    throw std::invalid_argument("Handle " + std::to_string(handle) +
                                " was not created or has been cleared.");
  }
  return in_time;
}

std::shared_ptr<Status> HandleManager::ReleaseHandle(int handle) {
""",
    ),
    Edit(
        name="wake-with-a-result",
        file=_HANDLES,
        reason="part of 'wait-for-a-handle'",
        old="""  results_[handle] = std::make_shared<Status>(status);
""",
        new="""  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
""",
    ),
    Edit(
        name="wake-without-a-result",
        file=_HANDLES,
        reason="part of 'wait-for-a-handle'",
        old="""  results_.clear();
""",
        new="""  results_.clear();
  done_.notify_all();
""",
    ),
)
