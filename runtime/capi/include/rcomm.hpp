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

/* An operation under way. Its buffers must stay valid until wait() has returned without an error, or released()
 * is true, even if the Work is destroyed before. */
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

/* Averages gradients of type T while the backward pass computes others. */
template <typename T> class Reducer {
  public:
    /* `parameters` are names and numbers of elements; sizes of 0 are the defaults. */
    Reducer(const Group &group, const std::vector<std::pair<std::string, uint64_t>> &parameters,
            std::size_t first_bytes = 0, std::size_t bucket_bytes = 0) {
        std::vector<const char *> names;
        std::vector<uint64_t> lens;
        for (const auto &[name, len] : parameters) {
            names.push_back(name.c_str());
            lens.push_back(len);
        }
        rcomm_reducer *made = nullptr;
        check(rcomm_reducer_new(group.get(), names.data(), lens.data(), names.size(), dtype<T>::code, first_bytes,
                                bucket_bytes, 0, &made));
        handle_.reset(made);
    }

    /* `options` is a JSON object, as for rcomm_reducer_new_with. */
    Reducer(const Group &group, const std::vector<std::pair<std::string, uint64_t>> &parameters,
            const std::string &options) {
        std::vector<const char *> names;
        std::vector<uint64_t> lens;
        for (const auto &[name, len] : parameters) {
            names.push_back(name.c_str());
            lens.push_back(len);
        }
        rcomm_reducer *made = nullptr;
        check(rcomm_reducer_new_with(group.get(), names.data(), lens.data(), names.size(), dtype<T>::code,
                                     options.c_str(), &made));
        handle_.reset(made);
    }

    /* The memory of a parameter's gradient. Fill it before the next call with this reducer. */
    std::pair<T *, std::size_t> gradient(std::size_t parameter) const {
        void *data = nullptr;
        std::size_t len = 0;
        check(rcomm_reducer_gradient(get(), parameter, &data, &len));
        return {static_cast<T *>(data), len};
    }

    void ready(std::size_t parameter) const { check(rcomm_reducer_ready(get(), parameter)); }
    void finish() const { check(rcomm_reducer_finish(get())); }

    /* For ranks that may run out of input before others: takes part in the others' steps until all ranks have called
     * this. Returns in how many steps this rank took part in that way, and a rank that had input in the last step. */
    std::pair<uint64_t, uint32_t> join() const {
        uint64_t shadowed = 0;
        uint32_t last = 0;
        check(rcomm_reducer_join(get(), &shadowed, &last));
        return {shadowed, last};
    }

    /* The memory of a parameter's average in the last step, valid until the next call with this reducer; NULL and 0 if
     * no rank has used the parameter. */
    std::pair<T *, std::size_t> average(std::size_t parameter) const {
        void *data = nullptr;
        std::size_t len = 0;
        check(rcomm_reducer_average(get(), parameter, &data, &len));
        return {static_cast<T *>(data), len};
    }

    rcomm_reducer *get() const noexcept { return handle_.get(); }

  private:
    detail::Handle<rcomm_reducer, rcomm_reducer_free> handle_;
};

} // namespace rcomm

#endif
