// Hooks of c10d's process groups that run without Python's interpreter lock.
//
// Compiled by `python -m rcomm build-hooks` for the installed PyTorch: the hooks of PyTorch 2.15
// (torch/csrc/distributed/c10d/Hooks.hpp) are in no stable interface. What is recorded is decided in
// `rcomm._native`, whose functions of src/native.rs are found by name when this library is loaded.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// As in src/native.rs.
constexpr uint32_t kLayout = 1;
enum Ending : uint32_t { kCompleted = 0, kFailed = 1, kUnwatched = 2 };

struct TensorView {
  const char* dtype;
  const int64_t* extents;
  size_t dimensions;
};

struct IssuedView {
  uint32_t name;
  uint32_t on_host;
  int64_t op_id;
  int64_t root;
  const TensorView* inputs;
  size_t input_count;
  const TensorView* outputs;
  size_t output_count;
};

struct Operation {
  uint64_t words[3];
  uint32_t waits_for_all;
  // Its Work shows no end before a wait for it has returned.
  uint32_t deferred;
};

struct Recorder {
  uint32_t (*layout)() = nullptr;
  void (*before)(const void* group, const IssuedView*) = nullptr;
  Operation (*after)(const void* group, int64_t op_id, uint32_t has_work) = nullptr;
  uint32_t (*is_deferred)(const void* group, Operation) = nullptr;
  void (*ended)(const void* group, Operation, uint32_t ending) = nullptr;
};

// Set once, before the first hook is registered.
Recorder recorder;

// A child made by fork has none of the threads, and may hold a copy of a lock that one of them held.
std::atomic<bool> forked{false};

// Operations under way, until they are seen to end: by the hooks of later operations, and by a thread.
class Watch {
 public:
  void push(const void* group, Operation operation, WorkPtr work) {
    One dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      all_.push_back(One{group, operation, std::move(work)});
      if (all_.size() > kMost) {
        dropped = std::move(all_.front());
        all_.pop_front();
      }
      if (!thread_.joinable() && !stop_) {
        thread_ = std::thread([this] { run(); });
      }
    }
    recent_.store(true, std::memory_order_relaxed);
    if (dropped.work) {
      recorder.ended(dropped.group, dropped.operation, kUnwatched);
    }
  }

  // Polls the oldest `most`, and records those that ended. A Work is queried, and dropped, outside of the lock: it may
  // be the last owner of tensors.
  void sweep(size_t most) {
    std::vector<One> look;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const size_t count = std::min(most, all_.size());
      look.reserve(count);
      look.assign(all_.begin(), all_.begin() + static_cast<std::ptrdiff_t>(count));
    }
    for (const One& one : look) {
      if (one.operation.deferred != 0) {
        if (recorder.is_deferred(one.group, one.operation) == 0) {
          take(one);
        }
        continue;
      }
      const std::optional<Ending> ending = end_of(*one.work);
      if (ending && take(one)) {
        recorder.ended(one.group, one.operation, *ending);
      }
    }
  }

  // A wait for a deferred operation returned, or raised.
  void waited(const WorkPtr& work, bool well) {
    One found;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const One& one : all_) {
        if (one.work == work) {
          found = one;
        }
      }
    }
    if (found.work && take(found)) {
      recorder.ended(found.group, found.operation, well ? kCompleted : kFailed);
    }
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return all_.size();
  }

  // Ends the thread. Operations under way are no longer polled.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  struct One {
    const void* group = nullptr;
    Operation operation{};
    WorkPtr work;
  };

  // The most operations that are watched; if there are more, the oldest is no longer watched.
  static constexpr size_t kMost = 8192;
  // How often the thread polls while operations are issued, and while none are.
  static constexpr std::chrono::milliseconds kBusy{2};
  static constexpr std::chrono::milliseconds kIdle{50};

  static std::optional<Ending> end_of(c10d::Work& work) {
    try {
      if (!work.isCompleted()) {
        return std::nullopt;
      }
      return work.exception() == nullptr ? kCompleted : kFailed;
    } catch (...) {
      // The state of such a Work is unknown from now on.
      return kUnwatched;
    }
  }

  // Whether it was still watched: a hook and the thread may look at one operation at the same time.
  bool take(const One& one) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = all_.begin(); at != all_.end(); ++at) {
      if (at->work == one.work && at->operation.words[0] == one.operation.words[0]) {
        all_.erase(at);
        return true;
      }
    }
    return false;
  }

  void run() {
    pthread_setname_np(pthread_self(), "rcomm-watcher");
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      const bool busy = recent_.exchange(false, std::memory_order_relaxed);
      wake_.wait_for(lock, busy ? kBusy : kIdle, [this] { return stop_; });
      if (stop_ || all_.empty()) {
        continue;
      }
      lock.unlock();
      sweep(kMost);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<One> all_;
  std::thread thread_;
  std::atomic<bool> recent_{false};
  bool stop_ = false;
};

// Never destroyed: PyTorch may call a hook while the process ends.
Watch& watch() {
  static Watch* one = new Watch;
  return *one;
}

// How many operations under way a hook polls.
constexpr size_t kLook = 4;

void views(const std::vector<at::Tensor>& tensors, std::vector<TensorView>& into) {
  into.clear();
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    const c10::IntArrayRef sizes = tensor.sizes();
    into.push_back({c10::toString(tensor.scalar_type()), sizes.data(), sizes.size()});
  }
}

bool on_host(const std::vector<at::Tensor>& tensors) {
  return !tensors.empty() && tensors.front().defined() && tensors.front().is_cpu();
}

// No error of a hook reaches the job.
template <typename Act>
void quietly(Act act) noexcept {
  if (forked.load(std::memory_order_relaxed)) {
    return;
  }
  try {
    act();
  } catch (...) {
  }
}

void before(const void* group, const c10d::PreHookArgs& args) {
  // Reused by the thread, so that a hook allocates only for a list that is longer than all before.
  thread_local std::vector<TensorView> inputs, outputs;
  watch().sweep(kLook);
  views(args.input_tensors, inputs);
  views(args.output_tensors, outputs);
  const bool host = on_host(args.input_tensors) || on_host(args.output_tensors);
  const IssuedView issued{
      static_cast<uint32_t>(args.name), host, args.op_id, args.root,
      inputs.data(), inputs.size(), outputs.data(), outputs.size()};
  recorder.before(group, &issued);
}

void after(const void* group, const c10d::PostHookArgs& args) {
  const Operation operation = recorder.after(group, args.op_id, args.work ? 1 : 0);
  if (operation.words[0] != 0) {
    watch().push(group, operation, args.work);
  }
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  TORCH_CHECK(function != nullptr, "the module rcomm._native lacks ", name);
}

// Finds the recorder in the module at `path`, which is loaded. Raises if it is another version's.
void load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  TORCH_CHECK(library != nullptr, "the module ", path, " is not loaded");
  Recorder found;
  find(library, "rcomm_python_layout", found.layout);
  find(library, "rcomm_python_before", found.before);
  find(library, "rcomm_python_after", found.after);
  find(library, "rcomm_python_is_deferred", found.is_deferred);
  find(library, "rcomm_python_ended", found.ended);
  TORCH_CHECK(
      found.layout() == kLayout,
      "these hooks were built for another version of rcomm: run `python -m rcomm build-hooks` again");
  recorder = found;
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

void attach(const GroupPtr& pg, int64_t hook_id, int64_t address) {
  const void* group = reinterpret_cast<const void*>(static_cast<uintptr_t>(address));
  pg->registerPreHook(hook_id, [group](const c10d::PreHookArgs& args) {
    quietly([&] { before(group, args); });
  });
  pg->registerPostHook(hook_id, [group](const c10d::PostHookArgs& args) {
    quietly([&] { after(group, args); });
  });
}

} // namespace

TORCH_LIBRARY(rcomm, library) {
  library.def("open(str path) -> ()", &load);
  library.def(
      "attach(__torch__.torch.classes.c10d.ProcessGroup pg, int hook_id, int address) -> ()",
      &attach);
  library.def(
      "waited(__torch__.torch.classes.c10d.Work work, bool well) -> ()",
      [](const WorkPtr& work, bool well) { quietly([&] { watch().waited(work, well); }); });
  library.def("sweep() -> ()", [] { quietly([] { watch().sweep(SIZE_MAX); }); });
  library.def("under_way() -> int", []() -> int64_t {
    return forked.load() ? 0 : static_cast<int64_t>(watch().size());
  });
  library.def("stop() -> ()", [] { quietly([] { watch().stop(); }); });
}
