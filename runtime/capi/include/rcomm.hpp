/*
 * A thin wrapper of rcomm.h for C++17: handles that free themselves, element types from the types of
 * pointers, and errors as exceptions. Everything is inline: a program links the C library only.
 *
 * For everything else, call the C functions with get(). A handle that was moved from is empty, and may
 * only be assigned to or destroyed.
 */
#ifndef RCOMM_HPP
#define RCOMM_HPP

#include "rcomm.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace rcomm {

/* The error of a call: what() has its text, code() is RCOMM_TIMEOUT and so on. */
class Error : public std::runtime_error {
  public:
    Error(int32_t code, const std::string &text) : std::runtime_error(text), code_(code) {}
    int32_t code() const noexcept { return code_; }

  private:
    int32_t code_;
};

/* Throws if a call of rcomm.h has failed. */
inline void check(int32_t code) {
    if (code != RCOMM_OK) throw Error(code, rcomm_last_error());
}

/* The code of an element type. Specialize it for types of 16-bit and 8-bit floats that your program has. */
template <typename T> struct dtype;
template <> struct dtype<float> { static constexpr uint8_t code = RCOMM_F32; };
template <> struct dtype<double> { static constexpr uint8_t code = RCOMM_F64; };
template <> struct dtype<int8_t> { static constexpr uint8_t code = RCOMM_I8; };
template <> struct dtype<uint8_t> { static constexpr uint8_t code = RCOMM_U8; };
template <> struct dtype<int16_t> { static constexpr uint8_t code = RCOMM_I16; };
template <> struct dtype<uint16_t> { static constexpr uint8_t code = RCOMM_U16; };
template <> struct dtype<int32_t> { static constexpr uint8_t code = RCOMM_I32; };
template <> struct dtype<uint32_t> { static constexpr uint8_t code = RCOMM_U32; };
template <> struct dtype<int64_t> { static constexpr uint8_t code = RCOMM_I64; };
template <> struct dtype<uint64_t> { static constexpr uint8_t code = RCOMM_U64; };
template <> struct dtype<bool> { static constexpr uint8_t code = RCOMM_BOOL; };

inline constexpr rcomm_reduction sum{RCOMM_SUM, 1.0};
inline constexpr rcomm_reduction avg{RCOMM_AVG, 1.0};
inline constexpr rcomm_reduction product{RCOMM_PRODUCT, 1.0};
inline constexpr rcomm_reduction min{RCOMM_MIN, 1.0};
inline constexpr rcomm_reduction max{RCOMM_MAX, 1.0};

namespace detail {
template <typename T, void (*release)(T *)> struct Release {
    void operator()(T *handle) const noexcept { release(handle); }
};
template <typename T, void (*release)(T *)> using Handle = std::unique_ptr<T, Release<T, release>>;

/* A text that rcomm has made. */
inline std::string take(char *text) {
    std::unique_ptr<char, Release<char, rcomm_text_free>> owned(text);
    return std::string(text);
}
} // namespace detail

/* A stream of a device. Handles of groups and memory that were made with it keep it. */
class Stream {
  public:
    explicit Stream(rcomm_stream *handle) : handle_(handle) {}

    /* The driver's handle: CUstream, cudaStream_t. */
    void *raw() const {
        void *raw = nullptr;
        check(rcomm_stream_raw(get(), &raw));
        return raw;
    }

    /* The number of its device in this process. */
    uint32_t device() const {
        uint32_t ordinal = 0;
        check(rcomm_stream_device(get(), &ordinal));
        return ordinal;
    }

    /* Waits for the work that is enqueued, without a deadline. */
    void synchronize() const { check(rcomm_stream_synchronize(get())); }

    rcomm_stream *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_stream, rcomm_stream_free> handle_;
};

/* Elements in the memory of a stream's device, all zero at first. */
template <typename T> class DeviceMemory {
  public:
    DeviceMemory(const Stream &stream, std::size_t count) : count_(count) {
        rcomm_device_memory *made = nullptr;
        check(rcomm_device_new(stream.get(), count, dtype<T>::code, &made));
        handle_.reset(made);
    }

    /* An address of the device: for kernels, and for operations of Group::on(stream). */
    T *data() const {
        void *address = nullptr;
        check(rcomm_device_address(get(), &address));
        return static_cast<T *>(address);
    }

    std::size_t size() const noexcept { return count_; }

    /* Copies as many elements to the device. */
    void fill(const std::vector<T> &elements) const { check(rcomm_device_fill(get(), elements.data(), elements.size())); }

    /* Copies the elements to the host, after the work on the stream. */
    std::vector<T> read() const {
        std::vector<T> elements(count_);
        check(rcomm_device_read(get(), elements.data(), elements.size()));
        return elements;
    }

    rcomm_device_memory *get() const noexcept { return handle_.get(); }

  private:
    std::size_t count_;
    detail::Handle<rcomm_device_memory, rcomm_device_free> handle_;
};

/* An operation under way. Its buffers must stay valid until wait() has returned without an error, or released() is
 * true, even if the Work is destroyed before. */
class Work {
  public:
    explicit Work(rcomm_work *handle) : handle_(handle) {}

    /* Waits for the operation's end; throws the operation's error if it has failed. */
    void wait() const { check(rcomm_work_wait(get())); }

    /* Waits for timeout_ms at most; returns whether the operation has ended. Throws the operation's error if it has
     * failed. */
    bool test(uint64_t timeout_ms = 0) const {
        int32_t ended = 0;
        check(rcomm_work_test(get(), timeout_ms, &ended));
        return ended != 0;
    }

    /* Lets later work on a stream wait for the operation; the host does not wait. */
    void wait_stream(const Stream &stream) const { check(rcomm_work_wait_stream(get(), stream.get())); }

    /* Whether the operation has ended, as wait() or test() has shown, and its buffers may be used again. */
    bool released() const {
        int32_t released = 0;
        check(rcomm_work_released(get(), &released));
        return released != 0;
    }

    rcomm_work *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_work, rcomm_work_free> handle_;
};

/* Memory of the same size on each rank of a host, which all of them use in place. Destroyed without close(), it is
 * freed at once: other ranks that wait for a signal of this one get an error, or reach their time-out. */
class SymmetricMemory {
  public:
    explicit SymmetricMemory(rcomm_symmetric *handle) : handle_(handle) {}

    /* The buffer of a rank, and its length in bytes. Order accesses by signals, or use atomic ones. */
    std::pair<void *, std::size_t> buffer(uint32_t peer) const {
        void *start = nullptr;
        std::size_t bytes = 0;
        check(rcomm_symmetric_buffer(get(), peer, &start, &bytes));
        return {start, bytes};
    }

    /* The signal pad of a rank, and its length in bytes. */
    std::pair<void *, std::size_t> signal_pad(uint32_t peer) const {
        void *start = nullptr;
        std::size_t bytes = 0;
        check(rcomm_symmetric_signal_pad(get(), peer, &start, &bytes));
        return {start, bytes};
    }

    void put_signal(uint32_t peer, uint32_t channel) const { check(rcomm_symmetric_put_signal(get(), peer, channel)); }
    void wait_signal(uint32_t peer, uint32_t channel) const { check(rcomm_symmetric_wait_signal(get(), peer, channel)); }
    void barrier(uint32_t channel = 0) const { check(rcomm_symmetric_barrier(get(), channel)); }

    /* Sets `count` words of four bytes of this rank's buffer, from word `offset` on. */
    void fill(std::size_t offset, uint32_t value, std::size_t count) const {
        check(rcomm_symmetric_fill(get(), offset, value, count));
    }

    /* Waits for all members, and frees the memory. */
    void close() { check(rcomm_symmetric_close(handle_.release())); }

    rcomm_symmetric *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_symmetric, rcomm_symmetric_free> handle_;
};

/* A set of ranks that communicate. The operations whose names do not end with _async return when they have ended. */
class Group {
  public:
    explicit Group(rcomm_group *handle) : handle_(handle) {}

    uint32_t rank() const {
        uint32_t rank = 0;
        check(rcomm_group_place(get(), &rank, nullptr));
        return rank;
    }

    uint32_t size() const {
        uint32_t size = 0;
        check(rcomm_group_place(get(), nullptr, &size));
        return size;
    }

    /* A handle of this group whose buffers are in the memory of the stream's device. */
    Group on(const Stream &stream) const {
        rcomm_group *handle = nullptr;
        check(rcomm_group_on_stream(get(), stream.get(), &handle));
        return Group(handle);
    }

    /* Releases the device memory of the communicators that can be made again, until resume(). All members call it. */
    void suspend() const { check(rcomm_group_suspend(get())); }
    void resume() const { check(rcomm_group_resume(get())); }

    /* The device memory of the communicators on this rank. */
    rcomm_comm_memory comm_memory() const {
        rcomm_comm_memory memory{};
        check(rcomm_group_comm_memory(get(), &memory));
        return memory;
    }

    /* All members call this, with the same size. */
    SymmetricMemory symmetric_memory(std::size_t bytes) const {
        rcomm_symmetric *made = nullptr;
        check(rcomm_symmetric_new(get(), bytes, &made));
        return SymmetricMemory(made);
    }

    void barrier() const { check(rcomm_barrier(get(), nullptr)); }

    template <typename T> void all_reduce(T *data, std::size_t count, rcomm_reduction reduction = sum) const {
        check(rcomm_all_reduce(get(), data, count, dtype<T>::code, reduction, nullptr));
    }

    template <typename T> Work all_reduce_async(T *data, std::size_t count, rcomm_reduction reduction = sum) const {
        rcomm_work *work = nullptr;
        check(rcomm_all_reduce(get(), data, count, dtype<T>::code, reduction, &work));
        return Work(work);
    }

    template <typename T>
    void reduce(T *data, std::size_t count, uint32_t root, rcomm_reduction reduction = sum) const {
        check(rcomm_reduce(get(), data, count, dtype<T>::code, reduction, root, nullptr));
    }

    template <typename T> void broadcast(T *data, std::size_t count, uint32_t root) const {
        check(rcomm_broadcast(get(), data, count, dtype<T>::code, root, nullptr));
    }

    /* `out` has size() times `count` elements. */
    template <typename T> void all_gather(const T *in, T *out, std::size_t count) const {
        check(rcomm_all_gather_single(get(), in, out, count, dtype<T>::code, nullptr));
    }

    /* `in` has size() times `count` elements. */
    template <typename T>
    void reduce_scatter(const T *in, T *out, std::size_t count, rcomm_reduction reduction = sum) const {
        check(rcomm_reduce_scatter_single(get(), in, out, count, dtype<T>::code, reduction, nullptr));
    }

    template <typename T> void send(const T *data, std::size_t count, uint32_t to, uint32_t tag = 0) const {
        check(rcomm_send(get(), data, count, dtype<T>::code, to, tag, nullptr));
    }

    template <typename T> void recv(T *data, std::size_t count, uint32_t from, uint32_t tag = 0) const {
        check(rcomm_recv(get(), data, count, dtype<T>::code, from, tag, nullptr));
    }

    template <typename T> Work recv_async(T *data, std::size_t count, uint32_t from, uint32_t tag = 0) const {
        rcomm_work *work = nullptr;
        check(rcomm_recv(get(), data, count, dtype<T>::code, from, tag, &work));
        return Work(work);
    }

    void set_timeout(uint64_t timeout_ms) const { check(rcomm_group_set_timeout(get(), timeout_ms)); }
    void abort(const std::string &reason) const { check(rcomm_group_abort(get(), reason.c_str())); }

    /* The group's progress on this rank, as JSON. */
    std::string status() const {
        char *json = nullptr;
        check(rcomm_group_status(get(), &json));
        return detail::take(json);
    }

    rcomm_group *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_group, rcomm_group_free> handle_;
};

/* Segments of device memory that NCCL allocates. Groups with which the pool is registered use them directly. */
class MemoryPool {
  public:
    explicit MemoryPool(rcomm_pool *handle) : handle_(handle) {}

    /* The address of a new segment, with undefined contents. */
    void *allocate(std::size_t bytes) const {
        void *address = nullptr;
        check(rcomm_pool_allocate(get(), bytes, &address));
        return address;
    }

    /* Frees a segment, on which all operations have ended. */
    void deallocate(void *address) const { check(rcomm_pool_deallocate(get(), address)); }

    void register_with(const Group &group) const { check(rcomm_pool_register(get(), group.get())); }
    void deregister_from(const Group &group) const { check(rcomm_pool_deregister(get(), group.get())); }

    /* The addresses and sizes of the segments, as JSON. */
    std::string segments() const {
        char *json = nullptr;
        check(rcomm_pool_segments(get(), &json));
        return detail::take(json);
    }

    rcomm_pool *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_pool, rcomm_pool_free> handle_;
};

/* Options of a world, by the names of their environment variables. */
class Config {
  public:
    Config() {
        rcomm_config *made = nullptr;
        check(rcomm_config_new(&made));
        handle_.reset(made);
    }

    Config &set(const std::string &name, const std::string &value) {
        check(rcomm_config_set(get(), name.c_str(), value.c_str()));
        return *this;
    }

    rcomm_config *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_config, rcomm_config_free> handle_;
};

/* A wait of the program's: counted until it is destroyed. */
class Wait {
  public:
    explicit Wait(rcomm_wait *handle) : handle_(handle) {}

  private:
    detail::Handle<rcomm_wait, rcomm_wait_end> handle_;
};

/* A function that answers a request at the rank's endpoint, by the parameters of the request. The failure's text is
 * that of the std::exception that it throws; there is none if it throws anything else, or if no memory is left for the
 * text. */
using Handler = std::function<std::string(const std::map<std::string, std::string> &)>;

namespace detail {
inline int32_t put(const rcomm_value *out, const std::string &text) noexcept {
    return rcomm_value_set(out, reinterpret_cast<const uint8_t *>(text.data()), text.size());
}

/* Its callers are not C++: no exception leaves it, also if there is no memory for the text of one. */
inline int32_t answer(void *context, const char *const *names, const char *const *values, std::size_t count,
                      const rcomm_value *out) noexcept {
    try {
        std::string text;
        int32_t code = RCOMM_OK;
        try {
            std::map<std::string, std::string> parameters;
            for (std::size_t at = 0; at < count; at++) parameters.emplace(names[at], values[at]);
            text = (*static_cast<Handler *>(context))(parameters);
        } catch (const std::exception &error) {
            code = RCOMM_BACKEND;
            text = error.what();
        } catch (...) {
            code = RCOMM_BACKEND;
        }
        const int32_t taken = put(out, text);
        if (taken == RCOMM_OK) return code;
        /* The text is too long, say: the answer is why. */
        put(out, rcomm_last_error());
        return taken;
    } catch (...) {
        return RCOMM_BACKEND;
    }
}

inline void forget(void *context) { delete static_cast<Handler *>(context); }
} // namespace detail

/* The membership in a job. A World that is destroyed without shutdown() aborts its groups. */
class World {
  public:
    explicit World(rcomm_world *handle) : handle_(handle) {}

    /* Joins the job that the environment describes. */
    static World init() {
        rcomm_world *world = nullptr;
        check(rcomm_init(&world));
        return World(world);
    }

    /* Joins the job that the environment describes, with these options in place of its own. */
    static World init(const Config &config) {
        rcomm_world *world = nullptr;
        check(rcomm_init_with(config.get(), &world));
        return World(world);
    }

    uint32_t rank() const {
        uint32_t rank = 0;
        check(rcomm_world_place(get(), &rank, nullptr));
        return rank;
    }

    uint32_t size() const {
        uint32_t size = 0;
        check(rcomm_world_place(get(), nullptr, &size));
        return size;
    }

    /* The group of all ranks, or after rcomm_shrink of those that are left. */
    Group group() const {
        rcomm_group *group = nullptr;
        check(rcomm_world_group(get(), &group));
        return Group(group);
    }

    Group new_group(const std::vector<uint32_t> &ranks, const std::string &purpose) const {
        rcomm_group *group = nullptr;
        check(rcomm_new_group(get(), ranks.data(), ranks.size(), purpose.c_str(), &group));
        return Group(group);
    }

    /* A group along each dimension, in row-major order. */
    std::vector<Group> device_mesh(const std::vector<std::pair<std::string, uint32_t>> &dimensions) const {
        std::vector<const char *> names;
        std::vector<uint32_t> sizes;
        for (const auto &[name, size] : dimensions) {
            names.push_back(name.c_str());
            sizes.push_back(size);
        }
        std::vector<rcomm_group *> made(dimensions.size(), nullptr);
        check(rcomm_device_mesh(get(), names.data(), sizes.data(), names.size(), made.data()));
        std::vector<Group> groups;
        groups.reserve(made.size());
        for (rcomm_group *group : made) groups.emplace_back(group);
        return groups;
    }

    /* One group of the members of several, which have `size` members together. */
    Group merge(const Group &group, uint32_t size, const std::string &purpose) const {
        rcomm_group *merged = nullptr;
        check(rcomm_merge(get(), group.get(), size, purpose.c_str(), &merged));
        return Group(merged);
    }

    /* A world of the members of groups of different jobs, through the store of `config`. */
    World merge_remote(const Group &group, uint32_t size, const std::string &purpose, const Config &config) const {
        rcomm_world *merged = nullptr;
        check(rcomm_merge_remote(get(), group.get(), size, purpose.c_str(), config.get(), &merged));
        return World(merged);
    }

    /* A stream on the device of this rank. */
    Stream stream(bool high_priority = false) const {
        rcomm_stream *made = nullptr;
        check(rcomm_stream_new(get(), high_priority, &made));
        return Stream(made);
    }

    /* A pool of memory that NCCL allocates on the device of this rank. */
    MemoryPool memory_pool() const {
        rcomm_pool *made = nullptr;
        check(rcomm_pool_new(get(), &made));
        return MemoryPool(made);
    }

    /* A stream of the program's: CUstream, cudaStream_t. It must outlive what is made with the handle. */
    Stream borrow_stream(void *raw) const {
        rcomm_stream *made = nullptr;
        check(rcomm_stream_borrow(get(), raw, &made));
        return Stream(made);
    }

    /* Answers POST /handlers/NAME at this rank's endpoint, on a thread of the endpoint. */
    void handle(const std::string &name, Handler handler) const {
        auto context = std::make_unique<Handler>(std::move(handler));
        check(rcomm_handle(get(), name.c_str(), detail::answer, detail::forget, context.release()));
    }

    /* Counts a wait of the program's until the result is destroyed. */
    Wait wait(const std::string &name) const {
        rcomm_wait *begun = nullptr;
        check(rcomm_wait_begin(get(), name.c_str(), &begun));
        return Wait(begun);
    }

    void phase(const std::string &name) const { check(rcomm_phase(get(), name.c_str())); }
    void step(int64_t step) const { check(rcomm_step(get(), step)); }

    /* This rank's record, as JSON. */
    std::string snapshot() const {
        char *json = nullptr;
        check(rcomm_snapshot(get(), &json));
        return detail::take(json);
    }

    /* How often and for how long threads of this process have waited, by the name of the wait, as JSON. */
    std::string waits() const {
        char *json = nullptr;
        check(rcomm_waits(get(), &json));
        return detail::take(json);
    }

    /* Waits for the other ranks and ends the membership; the World is then empty. All ranks call this, after they have
     * destroyed their Groups and Works. */
    void shutdown() { check(rcomm_shutdown(handle_.release())); }

    rcomm_world *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_world, rcomm_world_free> handle_;
};

} // namespace rcomm

#include "rcomm_reducer.hpp"
#include "rcomm_values.hpp"

#endif
