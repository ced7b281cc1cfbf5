/* For rcomm.hpp, which includes it: gradients averaged in buckets. */
#ifndef RCOMM_REDUCER_HPP
#define RCOMM_REDUCER_HPP

#include "rcomm.hpp"

namespace rcomm {

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
     * this. Returns in how many steps this rank took part in that way, and a rank that had input in every step. */
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
