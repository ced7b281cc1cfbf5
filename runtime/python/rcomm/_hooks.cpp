// Hooks of c10d's process groups that run without Python's interpreter lock.
//
// Compiled by `python -m rcomm build-hooks` for the installed PyTorch, since no stable interface of PyTorch has the
// hooks of 2.15 (torch/csrc/distributed/c10d/Hooks.hpp), nor the operators `c10d::*`, whose kernels take the place of
// hooks in earlier versions (RCOMM_HOOKS is 0). `rcomm._native` decides what is recorded; its functions, those of
// src/native.rs, are found by name when `rcomm::open` is called.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>
#if !RCOMM_HOOKS
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#endif

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The constants and types up to `Recorder` repeat those of src/native.rs.
constexpr uint32_t kLayout = 2;
enum Ending : uint32_t { kCompleted = 0, kFailed = 1, kUnwatched = 2 };

struct TensorView {
  const char* dtype;
  const int64_t* extents;
  size_t dimensions;
};

struct IssuedView {
  uint32_t name;
  uint32_t on_host;
  int64_t root;
  const TensorView* inputs;
  size_t input_count;
  const TensorView* outputs;
  size_t output_count;
};

struct Operation {
  uint64_t words[3];
  uint32_t waits_for_all;
  // 1 if the operation's Work shows no end before a wait for it has returned, else 0.
  uint32_t deferred;
};

struct Recorder {
  uint32_t (*layout)() = nullptr;
  void (*before)(const void* group, const IssuedView*) = nullptr;
  Operation (*after)(const void* group, uint32_t has_work) = nullptr;
  uint32_t (*is_deferred)(const void* group, Operation) = nullptr;
  void (*ended)(const void* group, Operation, uint32_t ending) = nullptr;
};

// Set by `load`, before the first hook is registered.
Recorder recorder;

// Whether this process is a forked child, where no hook may act: it has none of the threads, and may hold a copy of a
// lock that one of them held.
std::atomic<bool> forked{false};

// How many operations a hook polls: the oldest ones.
constexpr size_t kPolledByHook = 4;

// Operations under way, until a hook of a later operation, a wait, or the thread of this class sees that they ended.
class Watch {
 public:
  void push(const void* group, Operation operation, WorkPtr work) {
    Watched dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      watched_.push_back(Watched{group, operation, std::move(work)});
      if (watched_.size() > kMostWatched) {
        dropped = std::move(watched_.front());
        watched_.pop_front();
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

  // Polls the oldest `most` operations, and records those that ended. Of deferred ones, removes those that need not be
  // watched any more. A Work is queried, and dropped, outside of the lock: it may be the last owner of tensors.
  void sweep(size_t most) {
    // A hook's poll uses no memory of the heap.
    c10::SmallVector<Watched, kPolledByHook> oldest;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const size_t count = std::min(most, watched_.size());
      oldest.append(watched_.begin(), watched_.begin() + static_cast<std::ptrdiff_t>(count));
    }
    for (const Watched& polled : oldest) {
      if (polled.operation.deferred != 0) {
        if (recorder.is_deferred(polled.group, polled.operation) == 0) {
          take(polled);
        }
        continue;
      }
      const std::optional<Ending> ending = end_of(*polled.work);
      if (ending && take(polled)) {
        recorder.ended(polled.group, polled.operation, *ending);
      }
    }
  }

  // Records that a wait for a deferred operation returned, or raised.
  void waited(const WorkPtr& work, bool has_returned) {
    Watched found;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const Watched& watched : watched_) {
        if (watched.work == work) {
          found = watched;
        }
      }
    }
    if (found.work && take(found)) {
      recorder.ended(found.group, found.operation, has_returned ? kCompleted : kFailed);
    }
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return watched_.size();
  }

  // Ends the thread, for good: from now on only hooks poll.
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
  struct Watched {
    const void* group = nullptr;
    Operation operation{};
    WorkPtr work;
  };

  // The most operations that are watched; if there are more, the oldest is no longer watched.
  static constexpr size_t kMostWatched = 8192;
  // The time between two polls of the thread while operations are issued, and while none are.
  static constexpr std::chrono::milliseconds kBusyInterval{2};
  static constexpr std::chrono::milliseconds kIdleInterval{50};

  // How an operation ended, by its Work; nothing if it has not.
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

  // Removes an operation. Returns whether it was still watched: a hook and the thread may poll it at the same time.
  bool take(const Watched& taken) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = watched_.begin(); entry != watched_.end(); ++entry) {
      if (entry->work == taken.work && entry->operation.words[0] == taken.operation.words[0]) {
        watched_.erase(entry);
        return true;
      }
    }
    return false;
  }

  void run() {
    pthread_setname_np(pthread_self(), "rcomm-watcher");
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      const bool is_busy = recent_.exchange(false, std::memory_order_relaxed);
      wake_.wait_for(lock, is_busy ? kBusyInterval : kIdleInterval, [this] { return stop_; });
      if (stop_ || watched_.empty()) {
        continue;
      }
      lock.unlock();
      sweep(kMostWatched);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Watched> watched_;
  std::thread thread_;
  // Whether an operation was added since the thread last looked.
  std::atomic<bool> recent_{false};
  bool stop_ = false;
};

// Never destroyed: PyTorch may call a hook while the process ends.
Watch& watch() {
  static Watch* instance = new Watch;
  return *instance;
}

// Describes the tensors to the recorder; undefined ones are left out.
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

// Whether the first tensor is in the host's memory.
bool on_host(const std::vector<at::Tensor>& tensors) {
  return !tensors.empty() && tensors.front().defined() && tensors.front().is_cpu();
}

// Runs a part of a hook; does nothing in a forked child. No error reaches the job.
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

void before(
    const void* group,
    uint32_t name,
    int64_t root,
    const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& outputs) {
  // Reused by the thread, so that a hook allocates only for a list that is longer than all before.
  thread_local std::vector<TensorView> input_views, output_views;
  watch().sweep(kPolledByHook);
  views(inputs, input_views);
  views(outputs, output_views);
  const bool is_on_host = on_host(inputs) || on_host(outputs);
  const IssuedView issued{
      name, is_on_host, root,
      input_views.data(), input_views.size(), output_views.data(), output_views.size()};
  recorder.before(group, &issued);
}

void after(const void* group, const WorkPtr& work) {
  const Operation operation = recorder.after(group, work ? 1 : 0);
  if (operation.words[0] != 0) {
    watch().push(group, operation, work);
  }
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  TORCH_CHECK(function != nullptr, "the module rcomm._native lacks ", name);
}

// Finds the recorder in the module at `path`. Raises if the module is not loaded or is of another version of rcomm.
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

#if RCOMM_HOOKS

// Records this group from now on. `address` is what `GroupHooks.address()` gave for it.
void attach(const GroupPtr& pg, int64_t hook_id, int64_t address) {
  const void* group = reinterpret_cast<const void*>(static_cast<uintptr_t>(address));
  pg->registerPreHook(hook_id, [group](const c10d::PreHookArgs& args) {
    quietly([&] {
      try {
        before(
            group, static_cast<uint32_t>(args.name), args.root, args.input_tensors, args.output_tensors);
      } catch (...) {
        // The post-hook is called all the same, and must not find an operation that PyTorch refused earlier.
        recorder.before(group, nullptr);
      }
    });
  });
  pg->registerPostHook(hook_id, [group](const c10d::PostHookArgs& args) {
    quietly([&] { after(group, args.work); });
  });
}

#else

// The recorder's groups by PyTorch's. Another group may be made at the address of one that ended: a weak reference
// tells the two apart.
class Groups {
 public:
  void add(const GroupPtr& pg, const void* group) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    groups_.insert_or_assign(pg.get(), Recorded{c10::weak_intrusive_ptr<c10d::ProcessGroup>(pg), group});
  }

  const void* find(const c10d::ProcessGroup* pg) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = groups_.find(pg);
    return found == groups_.end() || found->second.alive.expired() ? nullptr : found->second.group;
  }

 private:
  struct Recorded {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> alive;
    const void* group;
  };
  std::shared_mutex mutex_;
  std::unordered_map<const c10d::ProcessGroup*, Recorded> groups_;
};

Groups& groups() {
  static Groups* instance = new Groups;
  return *instance;
}

// Records this group from now on. `address` is what `GroupHooks.address()` gave for it.
void attach(const GroupPtr& pg, int64_t, int64_t address) {
  groups().add(pg, reinterpret_cast<const void*>(static_cast<uintptr_t>(address)));
}

// An operator: its number in `c10d::HookOpName` of 2.15, and the names of its arguments, as in _dispatch.py; empty for
// an argument that it does not have.
struct Operator {
  const char* name;
  uint32_t number;
  const char* input;
  const char* output;
  const char* root;
};

constexpr std::array<Operator, 20> kOperators{{
    {"send", 0, "tensors", "", "dst"},
    {"recv_", 1, "", "tensors", "src"},
    {"recv_any_source_", 1, "", "tensors", ""},
    {"broadcast_", 2, "tensors", "tensors", "root_rank"},
    {"allreduce_", 3, "tensors", "tensors", ""},
    {"reduce_", 4, "tensors", "tensors", "root_rank"},
    {"allgather_", 5, "input_tensors", "output_tensors", ""},
    {"reduce_scatter_", 6, "input_tensors", "output_tensors", ""},
    {"alltoall_", 7, "input_tensors", "output_tensors", ""},
    {"barrier", 8, "", "", ""},
    {"scatter_", 9, "input_tensors", "output_tensors", "root_rank"},
    {"gather_", 10, "input_tensors", "output_tensors", "root_rank"},
    {"gather_into_tensor_", 10, "input_tensor", "output_tensor", "root_rank"},
    {"allreduce_coalesced_", 13, "tensors", "tensors", ""},
    {"_allgather_base_", 14, "input_tensor", "output_tensor", ""},
    {"allgather_coalesced_", 15, "input_list", "output_lists", ""},
    {"allgather_into_tensor_coalesced_", 16, "inputs", "outputs", ""},
    {"_reduce_scatter_base_", 17, "input_tensor", "output_tensor", ""},
    {"reduce_scatter_tensor_coalesced_", 18, "inputs", "outputs", ""},
    {"alltoall_base_", 19, "input", "output", ""},
}};

// An operator's number, how many arguments it has, and the index of each kind of argument; -1 if the operator has none.
struct Places {
  uint32_t number = 0;
  int64_t arguments = 0;
  int64_t group = -1;
  int64_t input = -1;
  int64_t output = -1;
  int64_t root = -1;
};

// The places of an operator's arguments; `group` is -1 if the operator is not among those above.
Places places(const c10::FunctionSchema& schema) {
  const std::string& full = schema.name();
  const std::string name = full.substr(full.rfind(':') + 1);
  Places found;
  found.arguments = static_cast<int64_t>(schema.arguments().size());
  for (const Operator& known : kOperators) {
    if (name != known.name) {
      continue;
    }
    found.number = known.number;
    for (int64_t index = 0; index < found.arguments; ++index) {
      const std::string& argument = schema.arguments()[static_cast<size_t>(index)].name();
      found.group = argument == "process_group" ? index : found.group;
      found.input = argument == known.input ? index : found.input;
      found.output = argument == known.output ? index : found.output;
      found.root = argument == known.root ? index : found.root;
    }
  }
  return found;
}

// Appends the tensors of an argument, which is a tensor, a list of tensors, or a list of lists.
void tensors(const c10::IValue& value, std::vector<at::Tensor>& into) {
  if (value.isTensor()) {
    into.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      into.push_back(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      tensors(element, into);
    }
  }
}

// The kernel of every operator above. It runs before the backend's: the key BackendSelect is used whatever the tensors'
// devices, and PyTorch has no kernels of these operators under it.
void recorded(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const void* group = nullptr;
  quietly([&] {
    // Each thread looks an operator's places up once.
    thread_local std::unordered_map<const c10::FunctionSchema*, Places> known;
    const c10::FunctionSchema* schema = &op.schema();
    auto entry = known.find(schema);
    if (entry == known.end()) {
      entry = known.emplace(schema, places(*schema)).first;
    }
    const Places& place_of = entry->second;
    if (place_of.group < 0) {
      return;
    }
    const auto argument = [&](int64_t place) -> const c10::IValue& {
      return (*stack)[stack->size() - static_cast<size_t>(place_of.arguments - place)];
    };
    const GroupPtr pg = argument(place_of.group).toCustomClass<c10d::ProcessGroup>();
    const void* found = groups().find(pg.get());
    if (found == nullptr) {
      return;
    }
    std::vector<at::Tensor> inputs, outputs;
    if (place_of.input >= 0) {
      tensors(argument(place_of.input), inputs);
    }
    if (place_of.output >= 0) {
      tensors(argument(place_of.output), outputs);
    }
    const int64_t root = place_of.root >= 0 ? argument(place_of.root).toInt() : -1;
    before(found, place_of.number, root, inputs, outputs);
    group = found;
  });
  const c10::DispatchKeySet later(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  op.redispatchBoxed(keys & later, stack);
  if (group != nullptr) {
    quietly([&] {
      const c10::IValue& work = stack->back();
      after(group, work.isNone() ? WorkPtr() : work.toCustomClass<c10d::Work>());
    });
  }
}

#endif

} // namespace

TORCH_LIBRARY(rcomm, library) {
  library.def("open(str path) -> ()", &load);
  library.def(
      "attach(__torch__.torch.classes.c10d.ProcessGroup pg, int hook_id, int address) -> ()",
      &attach);
  library.def(
      "waited(__torch__.torch.classes.c10d.Work work, bool has_returned) -> ()",
      [](const WorkPtr& work, bool has_returned) {
        quietly([&] { watch().waited(work, has_returned); });
      });
  library.def("sweep() -> ()", [] { quietly([] { watch().sweep(SIZE_MAX); }); });
  library.def("under_way() -> int", []() -> int64_t {
    return forked.load() ? 0 : static_cast<int64_t>(watch().size());
  });
  library.def("stop() -> ()", [] { quietly([] { watch().stop(); }); });
}

#if !RCOMM_HOOKS
TORCH_LIBRARY_IMPL(c10d, BackendSelect, library) {
  for (const Operator& recorded_operator : kOperators) {
    // A version may lack an operator.
    const c10::OperatorName name(std::string("c10d::") + recorded_operator.name, "");
    if (c10::Dispatcher::singleton().findSchema(name)) {
      library.impl(recorded_operator.name, torch::CppFunction::makeFromBoxedFunction<&recorded>());
    }
  }
}
#endif
