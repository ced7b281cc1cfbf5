/* For rcomm.hpp, which includes it: collectives over the store. */
#ifndef RCOMM_VALUES_HPP
#define RCOMM_VALUES_HPP

#include "rcomm.hpp"

namespace rcomm {

/* Collectives of small values over a store. All ranks call the same functions in the same order. Each call waits for
 * timeout_ms at most, and after that for two seconds more to find out which ranks did not come: its error names
 * them. */
class StoreCollectives {
  public:
    /* Of the ranks of world.group(). The name is used once in an attempt of the job. */
    StoreCollectives(const World &world, const std::string &name) {
        rcomm_store_collectives *made = nullptr;
        check(rcomm_store_collectives_new(world.get(), name.c_str(), &made));
        handle_.reset(made);
    }

    /* Of `size` ranks, for rank `rank`, over a store of the program's that rcomm_config_set_store has set. */
    StoreCollectives(const Config &config, const std::string &name, uint32_t rank, uint32_t size) {
        rcomm_store_collectives *made = nullptr;
        check(rcomm_store_collectives_with(config.get(), name.c_str(), rank, size, &made));
        handle_.reset(made);
    }

    void barrier(uint64_t timeout_ms) const { check(rcomm_store_barrier(get(), timeout_ms)); }

    int64_t all_sum(int64_t number, uint64_t timeout_ms) const {
        int64_t sum = 0;
        check(rcomm_store_all_sum(get(), number, timeout_ms, &sum));
        return sum;
    }

    /* The values of all ranks, by rank. */
    std::vector<std::string> all_gather(const std::string &value, uint64_t timeout_ms) const {
        rcomm_values *values = nullptr;
        check(rcomm_store_all_gather(get(), bytes(value), value.size(), timeout_ms, &values));
        return take(values);
    }

    /* The value of `root`; that of the other ranks is ignored. */
    std::string broadcast(const std::string &value, uint32_t root, uint64_t timeout_ms) const {
        rcomm_values *values = nullptr;
        check(rcomm_store_broadcast(get(), bytes(value), value.size(), root, timeout_ms, &values));
        return take(values).front();
    }

    /* The values of all ranks, by rank, on `root`; none on the others. */
    std::vector<std::string> gather(const std::string &value, uint32_t root, uint64_t timeout_ms) const {
        rcomm_values *values = nullptr;
        check(rcomm_store_gather(get(), bytes(value), value.size(), root, timeout_ms, &values));
        return take(values);
    }

    /* This rank's value of those of `root`, which passes one for each rank; the lists of the others are ignored. */
    std::string scatter(const std::vector<std::string> &list, uint32_t root, uint64_t timeout_ms) const {
        std::vector<const uint8_t *> starts;
        std::vector<std::size_t> lengths;
        for (const std::string &value : list) {
            starts.push_back(bytes(value));
            lengths.push_back(value.size());
        }
        rcomm_values *values = nullptr;
        check(rcomm_store_scatter(get(), starts.data(), lengths.data(), list.size(), root, timeout_ms, &values));
        return take(values).front();
    }

    rcomm_store_collectives *get() const noexcept { return handle_.get(); }

  private:
    static const uint8_t *bytes(const std::string &value) { return reinterpret_cast<const uint8_t *>(value.data()); }

    static std::vector<std::string> take(rcomm_values *values) {
        const detail::Handle<rcomm_values, rcomm_values_free> owned(values);
        std::vector<std::string> taken;
        std::size_t count = 0;
        if (values != nullptr) check(rcomm_values_count(values, &count));
        for (std::size_t number = 0; number < count; number++) {
            const uint8_t *start = nullptr;
            std::size_t length = 0;
            check(rcomm_values_get(values, number, &start, &length));
            taken.emplace_back(reinterpret_cast<const char *>(start), length);
        }
        return taken;
    }

    detail::Handle<rcomm_store_collectives, rcomm_store_collectives_free> handle_;
};

} // namespace rcomm

#endif
