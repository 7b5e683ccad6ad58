"""The fixes to Horovod 0.28.1's source: small named edits, each with its reason.

The text of an edit's `old` and `new` is part of the wheel's version (`edit.digest`), comments in it included.
"""

from __future__ import annotations

from raytrain_plus.install.edit import Edit
from raytrain_plus.install.wakeups import WAKEUPS

HOROVOD_VERSION = "0.28.1"

_PAIR = "third_party/gloo/gloo/transport/tcp/pair.cc"
_PAIR_HEADER = "third_party/gloo/gloo/transport/tcp/pair.h"
_OPERATIONS = "horovod/common/operations.cc"
_TORCH = "horovod/torch/mpi_ops_v2.cc"
_STORE = "horovod/common/gloo/http_store.cc"
_CONTEXT = "horovod/common/gloo/gloo_context.cc"

EDITS: tuple[Edit, ...] = (
    Edit(
        name="c++17",
        file="CMakeLists.txt",
        reason="torch's headers need C++17 since torch 2.1",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
    ),
    Edit(
        name="c++17-torch",
        file="horovod/torch/CMakeLists.txt",
        reason="torch's headers need C++17 since torch 2.1",
        old="    set(CMAKE_CXX_STANDARD 14)",
        new="    set(CMAKE_CXX_STANDARD 17)",
    ),
    Edit(
        name="device-thread-does-not-throw",
        file=_PAIR,
        reason="an out-of-step message (the peer died, or another world reused its port) throws on the device thread, "
        "where nothing catches it, and the process aborts; make it an error of this connection",
        old="""  if (state_ == CONNECTED) {
    handleReadWrite(events);
    return;
  }

  if (state_ == LISTENING) {
    handleListening();
    return;
  }

  if (state_ == CONNECTING) {
    handleConnecting();
    return;
  }

  GLOO_ENFORCE(false, "Unexpected state: ", state_);
""",
        new="""  try {
    if (state_ == CONNECTED) {
      handleReadWrite(events);
      return;
    }

    if (state_ == LISTENING) {
      handleListening();
      return;
    }

    if (state_ == CONNECTING) {
      handleConnecting();
      return;
    }

    GLOO_ENFORCE(false, "Unexpected state: ", state_);
  } catch (const std::exception& error) {
    if (ex_ == nullptr) {
      signalException(GLOO_ERROR_MSG("Connection failed ", peer_.str(), ": ", error.what()));
    }
  }
""",
    ),
    Edit(
        name="tell-sends-and-the-receive-in-progress",
        file=_PAIR,
        reason="an error on a connection is reported to pending operations, but not to a queued send of an unbound "
        "buffer, nor to the receive in progress, which is no longer pending: their waiters wait for the timeout",
        old="""  for (auto& op : tx_) {
    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
  }
""",
        new="""  for (auto& op : tx_) {
    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
    if (op.ubuf) {
      NonOwningPtr<UnboundBuffer> buf(op.ubuf);
      if (buf) {
        buf->signalException(ex);
      }
    }
  }

  // The receive in progress.
  if (rx_.ubuf) {
    NonOwningPtr<UnboundBuffer> buf(rx_.ubuf);
    if (buf) {
      buf->signalException(ex);
    }
  }
""",
    ),
    Edit(
        name="tell-a-send-that-failed-at-once",
        file=_PAIR,
        reason="a send that the device thread starts and that fails before it is queued is in no list, so its failure "
        "is not reported",
        old="""  // Write may have resulted in an error.
  throwIfException();
""",
        new="""  // Write may have resulted in an error.
  if (ex_ != nullptr && op.ubuf) {
    NonOwningPtr<UnboundBuffer> buf(op.ubuf);
    if (buf) {
      buf->signalException(ex_);
    }
  }
  throwIfException();
""",
    ),
    Edit(
        name="catch-a-failed-formation",
        file=_OPERATIONS,
        reason="if a peer never comes, or dies while the world forms, the background thread throws and the process "
        "aborts; fail the initialisation instead",
        old="""    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
""",
        new="""    try {
      global_gloo_context.Initialize(ParseGlooIface());
      if (state.control_operation == LibType::GLOO) {
        // Initializes global controller
        state.process_set_table.Initialize(global_gloo_context);
      }
    } catch (const std::exception& ex) {
      LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
      state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
      global_gloo_context.Finalize();
      state.initialization_failed = true;
      return;
    }
  }
""",
    ),
    Edit(
        name="forget-a-failed-formation",
        file=_OPERATIONS,
        reason="the flag of a failed initialisation stays set, so the next one in the process fails as well",
        old="""    horovod_global.shut_down = false;
    horovod_global.initialization_done = false;
""",
        new="""    horovod_global.shut_down = false;
    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
""",
    ),
    Edit(
        name="enqueue-without-the-interpreter-lock",
        file=_TORCH,
        reason="when a peer dies, the background thread releases every tensor under the lock of its process sets, and "
        "releasing one takes the interpreter's lock (torch counts references from Python there); a thread that "
        "enqueues at that moment takes the two locks in the opposite order, and the process deadlocks",
        old="""int DoAllreduce(::torch::Tensor tensor, ::torch::Tensor output, int divisor,
                const std::string& name, int reduce_op_int,
                double prescale_factor, double postscale_factor,
                int process_set_id) {
""",
        new="""int DoAllreduce(::torch::Tensor tensor, ::torch::Tensor output, int divisor,
                const std::string& name, int reduce_op_int,
                double prescale_factor, double postscale_factor,
                int process_set_id) {
  py::gil_scoped_release release_python_gil;
""",
    ),
    Edit(
        name="give-up-what-came-too-late",
        file=_OPERATIONS,
        reason="a thread that enqueues first checks whether the background thread has ended; if that ends between the "
        "check and the enqueuing, it has failed all earlier entries, and nothing ever completes the later one",
        old="""  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);
""",
        new="""  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);
  if (status.ok() && horovod_global.shut_down) {
    process_set.tensor_queue.FinalizeTensorQueue(SHUT_DOWN_ERROR);
  }
""",
    ),
    Edit(
        name="nothing-more-after-a-failure",
        file=_OPERATIONS,
        reason="when an operation fails on one member because a peer died, that member continues with the next round "
        "of negotiation; another member, still inside the operation, takes its first message for the data that it "
        "awaits: all of Gloo's reductions share one tag, so a sum is wrong and is reported as a success",
        old="""        << "ExecuteOperation Failed";
    status = Status::UnknownError(ex.what());
  }

  if (!status.in_progress()) {
    for (auto& e : entries) {
      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
}
""",
        new="""        << "ExecuteOperation Failed";
    status = Status::UnknownError(ex.what());
    for (auto& e : entries) {
      timeline.End(e.tensor_name, nullptr);
      e.FinishWithCallback(status);
    }
    // Ends the background loop, before it says anything more.
    throw;
  }

  if (!status.in_progress()) {
    for (auto& e : entries) {
      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
}
""",
    ),
    Edit(
        name="one-interface-for-all-meshes",
        file=_CONTEXT,
        reason="the mesh of the global process set ignores the requested interface and listens on the address that the "
        "host name resolves to: often 127.0.0.1, so members on two machines never connect",
        old="""  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
        new="""  device_attr.iface = global_context.gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
    ),
    Edit(
        name="gone-ends-the-wait",
        file=_STORE,
        reason="a missing key is polled until the timeout; status 410 reports at once that the world will not form",
        old="""  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    try {
      http::Response response = request.send(method, body);
      if (response.status != HTTP_OK""",
        new="""  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    bool gone = false;
    try {
      http::Response response = request.send(method, body);
      gone = response.status == 410;
      if (response.status != HTTP_OK""",
    ),
    Edit(
        name="gone-throws",
        file=_STORE,
        reason="the second part of 'gone-ends-the-wait': throw outside the block that catches and retries",
        old="""    // sleep for 500ms before another try.
""",
        new="""    if (gone) {
      throw std::runtime_error("the formation of this world was cancelled");
    }

    // sleep for 500ms before another try.
""",
    ),
    Edit(
        name="token-in-every-request",
        file=_STORE,
        reason="the rendezvous answers only members, and each member may publish only its own keys: every request "
        "carries the member's token",
        old="""      http::Response response = request.send(method, body);
      gone =""",
        new="""      std::vector<std::string> headers;
      const char* token = std::getenv("HOROVOD_GLOO_RENDEZVOUS_TOKEN");
      if (token != nullptr && *token != '\\0') {
        headers.push_back(std::string("Authorization: Bearer ") + token);
      }
      http::Response response = request.send(method, body, headers);
      gone =""",
    ),
    Edit(
        name="link-key-kept",
        file=_PAIR_HEADER,
        reason="the first part of 'link-key': a connection stores the key that only its two members know",
        old="""  bool is_client_;
""",
        new="""  bool is_client_;
  std::string linkKey_;
""",
    ),
    Edit(
        name="link-key-read",
        file=_PAIR,
        reason="Gloo takes the first process that connects to a member's port for its peer; with 'link-key', that "
        "process must first send the key that only these two members know",
        old="""} // namespace

Pair::Pair(
""",
        new="""// Returns the key that this process shares with the member of that rank; empty if there is none.
std::string linkKeyOf(int rank) {
  const char* keys = ::getenv("HOROVOD_GLOO_LINK_KEYS");
  std::istringstream stream(keys == nullptr ? "" : keys);
  std::string key;
  for (int i = 0; i <= rank; i++) {
    if (!std::getline(stream, key, ',')) {
      return "";
    }
  }
  return key;
}

// Reads the key from a new connection. It came in one piece, before the kernel showed the connection.
bool saysLinkKey(int fd, const std::string& key) {
  std::string said(key.size(), '\\0');
  const auto got = ::recv(fd, &said[0], said.size(), MSG_DONTWAIT);
  unsigned char differ = 0;
  for (size_t i = 0; i < key.size(); i++) {
    differ |= static_cast<unsigned char>(said[i] ^ key[i]);
  }
  return got == static_cast<ssize_t>(key.size()) && differ == 0;
}

} // namespace

Pair::Pair(
""",
    ),
    Edit(
        name="link-key-set",
        file=_PAIR,
        reason="part of 'link-key'",
        old="""      is_client_(false),
      ex_(nullptr) {
""",
        new="""      is_client_(false),
      linkKey_(linkKeyOf(rank)),
      ex_(nullptr) {
""",
    ),
    Edit(
        name="link-key-awaited",
        file=_PAIR,
        reason="part of 'link-key': the kernel reports a connection only when the key has arrived, so that a process "
        "that connects and sends nothing does not block the member",
        old="""  // listen(2) on socket
""",
        new="""  if (!linkKey_.empty()) {
    int seconds = 10;
    rv = setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof(seconds));
    if (rv == -1) {
      ::close(fd);
      signalAndThrowException(GLOO_ERROR_MSG("setsockopt: ", strerror(errno)));
    }
  }

  // listen(2) on socket
""",
    ),
    Edit(
        name="link-key-checked",
        file=_PAIR,
        reason="part of 'link-key': the connection of a process without the key is closed, and the port keeps "
        "listening",
        old="""  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);
""",
        new="""  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);
  if (rv != -1 && !linkKey_.empty() && !saysLinkKey(rv, linkKey_)) {
    ::close(rv);
    return;
  }
""",
    ),
    Edit(
        name="link-key-said",
        file=_PAIR,
        reason="part of 'link-key': the member that connects sends the key, in one piece, before anything else",
        old="""        GLOO_ERROR_MSG("connect ", peer_.str(), ": ", strerror(optval)));
    return;
  }
""",
        new="""        GLOO_ERROR_MSG("connect ", peer_.str(), ": ", strerror(optval)));
    return;
  }
  if (!linkKey_.empty()) {
    const auto sent = ::send(fd_, linkKey_.data(), linkKey_.size(), MSG_NOSIGNAL);
    if (sent != static_cast<ssize_t>(linkKey_.size())) {
      signalException(GLOO_ERROR_MSG("send ", peer_.str(), ": ", strerror(errno)));
      return;
    }
  }
""",
    ),
    *WAKEUPS,
)

WITHOUT_CUDA = Edit(
    name="without-cuda",
    file="cmake/Modules/FindPytorch.cmake",
    reason="a torch with CUDA and a folder /usr/local/cuda, as in images with CUDA's runtime alone, make CMake require "
    "the CUDA toolkit, although no operation on GPUs is wanted",
    old="""string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)
""",
    new="""set(Pytorch_CUDA FALSE)
""",
)
"""Not one of `EDITS`: it changes whether Horovod can be built, not what is built."""
