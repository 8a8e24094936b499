// The C API.
#include "tvm_fuse/runner.h"

#include <new>

#include "error.h"
#include "session.h"

using tvm_fuse::Error;
using tvm_fuse::Port;
using tvm_fuse::Session;
using tvm_fuse::Status;

struct tvm_fuse_network {
  Session session;
};

namespace {

thread_local std::string last_error;

int fail(Status status, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();  // no memory even for that
  }
  return static_cast<int>(status);
}

const Session& checked(const tvm_fuse_network* network) {
  if (network == nullptr) throw Error(Status::kUsage, "the network is NULL");
  return network->session;
}

Session& checked(tvm_fuse_network* network) {
  return const_cast<Session&>(checked(static_cast<const tvm_fuse_network*>(network)));
}

void describe(const Session& session, const Port& port, tvm_fuse_port* to) {
  if (to == nullptr) throw Error(Status::kUsage, "there is nowhere to put the description: the port is NULL");
  const tvm_fuse::Tensor& tensor = session.bundle().tensors[port.tensor];
  *to = {port.name.c_str(), tensor.dtype->name, tensor.shape.data(), tensor.shape.size(), tensor.size_bytes()};
}

}  // namespace

int tvm_fuse::guarded(const std::function<void()>& work) noexcept {
  try {
    work();
    return TVM_FUSE_OK;
  } catch (const Error& error) {
    try {
      return fail(error.status, error.text().c_str());
    } catch (...) {
      return fail(error.status, error.what());
    }
  } catch (const std::bad_alloc&) {
    return fail(Status::kInternal, "this machine is out of memory");
  } catch (const std::exception& error) {
    return fail(Status::kInternal, error.what());
  } catch (...) {
    return fail(Status::kInternal, "unknown exception");
  }
}

using tvm_fuse::guarded;

int tvm_fuse_open(const char* folder, const tvm_fuse_options* options, tvm_fuse_network** network) {
  return guarded([&] {
    if (network == nullptr) throw Error(Status::kUsage, "there is nowhere to put the network: it is NULL");
    *network = nullptr;
    if (folder == nullptr) throw Error(Status::kUsage, "the folder is NULL");
    const tvm_fuse_options chosen = options != nullptr ? *options : tvm_fuse_options{};
    const char* driver = chosen.driver != nullptr ? chosen.driver : "libcuda.so.1";
    const char* image = chosen.image != nullptr ? chosen.image : "";
    *network = new tvm_fuse_network{{tvm_fuse::open_folder(folder), chosen.device, driver, image}};
  });
}

void tvm_fuse_close(tvm_fuse_network* network) { delete network; }

size_t tvm_fuse_input_count(const tvm_fuse_network* network) {
  return network == nullptr ? 0 : network->session.bundle().inputs.size();
}

size_t tvm_fuse_output_count(const tvm_fuse_network* network) {
  return network == nullptr ? 0 : network->session.bundle().outputs.size();
}

int tvm_fuse_input(const tvm_fuse_network* network, size_t index, tvm_fuse_port* port) {
  return guarded([&] {
    const Session& session = checked(network);
    describe(session, session.port(session.bundle().inputs, index, "input"), port);
  });
}

int tvm_fuse_output(const tvm_fuse_network* network, size_t index, tvm_fuse_port* port) {
  return guarded([&] {
    const Session& session = checked(network);
    describe(session, session.port(session.bundle().outputs, index, "output"), port);
  });
}

int tvm_fuse_set_input(tvm_fuse_network* network, size_t index, const void* data, size_t size_bytes) {
  return guarded([&] { checked(network).set_input(index, data, size_bytes); });
}

int tvm_fuse_run(tvm_fuse_network* network) {
  return guarded([&] { checked(network).run(); });
}

int tvm_fuse_get_output(tvm_fuse_network* network, size_t index, void* data, size_t size_bytes) {
  return guarded([&] { checked(network).get_output(index, data, size_bytes); });
}

const char* tvm_fuse_last_error(void) { return last_error.c_str(); }
