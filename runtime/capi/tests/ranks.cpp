/* One rank of two, with a device: uses every class of rcomm.hpp and checks what it does. */
#include <rcomm.hpp>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            std::fprintf(stderr, "ranks.cpp:%d: %s\n", __LINE__, #condition); \
            std::exit(1); \
        } \
    } while (0)

/* The most bytes that this thread may allocate at once. */
static thread_local std::size_t most_bytes = SIZE_MAX;

void *operator new(std::size_t size) {
    void *memory = size > most_bytes ? nullptr : std::malloc(size);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }

/* An error for whose text there is no memory. */
struct Untold : std::exception {
    const char *what() const noexcept override {
        most_bytes = 0;
        return "a text that is longer than what a string holds without an allocation of memory for it";
    }
};

static void collectives(const rcomm::Group &group) {
    const uint32_t rank = group.rank(), size = group.size();
    std::vector<float> ones(3, 1.0f);
    group.all_reduce(ones.data(), ones.size());
    CHECK(ones[2] == static_cast<float>(size));
    double highest = rank;
    rcomm::Work work = group.all_reduce_async(&highest, 1, rcomm::max);
    while (!work.test(1000)) {}
    work.wait();
    CHECK(work.released());
    CHECK(highest == size - 1.0);
    int64_t from_last = rank == size - 1 ? 7 : 0;
    group.broadcast(&from_last, 1, size - 1);
    CHECK(from_last == 7);
    std::vector<uint32_t> all(size);
    group.all_gather(&rank, all.data(), 1);
    for (uint32_t r = 0; r < size; r++) CHECK(all[r] == r);
    uint32_t own = 0;
    group.reduce_scatter(all.data(), &own, 1);
    CHECK(own == rank * size);
    int32_t total = 1;
    group.reduce(&total, 1, 0);
    CHECK(total == (rank == 0 ? static_cast<int32_t>(size) : 1));
    if (size > 1 && rank < 2) {
        uint8_t sent = static_cast<uint8_t>(rank), got = 9;
        rcomm::Work receive = group.recv_async(&got, 1, 1 - rank, 4);
        group.send(&sent, 1, 1 - rank, 4);
        receive.wait();
        CHECK(got == 1 - rank);
    }
    group.barrier();
}

static void errors(const rcomm::World &world) {
    const rcomm::Group alone = world.new_group({world.rank()}, "alone");
    alone.set_timeout(5000);
    CHECK(alone.status().find("\"alone\"") != std::string::npos);
    alone.abort("enough");
    try {
        alone.barrier();
        CHECK(!"an aborted group refuses operations");
    } catch (const rcomm::Error &error) {
        CHECK(error.code() == RCOMM_ABORTED);
        CHECK(std::string(error.what()).find("enough") != std::string::npos);
    }
}

static void training(const rcomm::Group &group) {
    rcomm::Reducer<double> reducer(group, {{"hidden", 5}, {"output", 2}}, 16, 16);
    for (int step = 1; step < 4; step++) {
        for (std::size_t parameter : {1, 0}) {
            auto [gradient, len] = reducer.gradient(parameter);
            for (std::size_t at = 0; at < len; at++) gradient[at] = step * (group.rank() + 1.0);
            reducer.ready(parameter);
        }
        reducer.finish();
        auto [average, len] = reducer.average(0);
        CHECK(len == 5 && average[4] == step * (group.size() + 1.0) / 2);
    }
    const rcomm::Reducer<float> uneven(group, {{"all", 4}}, R"({"uneven": "divide_by_size"})");
    const auto [shadowed, last] = uneven.join();
    CHECK(shadowed == 0 && last == group.size() - 1);
}

static void devices(const rcomm::World &world, const rcomm::Group &group) {
    const rcomm::Stream stream = world.stream(), other = world.stream(true), same = world.borrow_stream(stream.raw());
    CHECK(stream.raw() != nullptr && same.device() == stream.device());
    const rcomm::Group on = group.on(stream);
    const rcomm::DeviceMemory<int64_t> memory(stream, 100);
    memory.fill(std::vector<int64_t>(memory.size(), 2));
    on.all_reduce(memory.data(), memory.size());
    const rcomm::Work work = on.all_reduce_async(memory.data(), memory.size());
    work.wait_stream(other);
    work.wait_stream(stream);
    CHECK(memory.read() == std::vector<int64_t>(100, 2 * group.size() * group.size()));
    work.wait();
    stream.synchronize();
}

static void symmetric(const rcomm::Group &group) {
    rcomm::SymmetricMemory memory = group.symmetric_memory(64);
    const uint32_t rank = group.rank(), size = group.size(), next = (rank + 1) % size, before = (rank + size - 1) % size;
    memory.fill(0, rank + 1, 2);
    memory.barrier();
    CHECK(static_cast<uint32_t *>(memory.buffer(next).first)[1] == next + 1 && memory.buffer(next).second == 64);
    CHECK(memory.signal_pad(rank).first != nullptr);
    memory.put_signal(next, 3);
    memory.wait_signal(before, 3);
    memory.close();
}

static void merges(const rcomm::World &world, const rcomm::Group &group) {
    const rcomm::Group alone = world.new_group({world.rank()}, "half");
    const rcomm::Group merged = world.merge(alone, world.size(), "whole");
    CHECK(merged.size() == world.size());
    merged.barrier();
    /* The store of this job outlives the world that is made through it. */
    rcomm::World other = world.merge_remote(alone, world.size(), "cpp merged", rcomm::Config().set("RCOMM_STORE", "secret"));
    CHECK(other.rank() == world.rank() && other.size() == world.size());
    other.group().barrier();
    other.shutdown();
    group.barrier();
}

static void control(const rcomm::World &world) {
    world.handle("rate", [](const std::map<std::string, std::string> &parameters) { return parameters.at("rate"); });
    try {
        world.handle("Rate", [](const std::map<std::string, std::string> &) { return std::string(); });
        CHECK(!"the name is refused");
    } catch (const rcomm::Error &error) {
        CHECK(error.code() == RCOMM_INVALID_ARGUMENT);
    }
    rcomm::Handler untold = [](const std::map<std::string, std::string> &) -> std::string { throw Untold(); };
    const int32_t code = rcomm::detail::answer(&untold, nullptr, nullptr, 0, nullptr);
    most_bytes = SIZE_MAX;
    CHECK(code == RCOMM_BACKEND);
    /* A text that is not taken is a failure: here there is no place for it. */
    rcomm::Handler told = [](const std::map<std::string, std::string> &) { return std::string("told"); };
    CHECK(rcomm::detail::answer(&told, nullptr, nullptr, 0, nullptr) == RCOMM_INVALID_ARGUMENT);
    const rcomm::Wait wait = world.wait("loader");
    CHECK(world.waits().find("\"loader\"") != std::string::npos);
}

static void values(const rcomm::World &world) {
    const rcomm::StoreCollectives store(world, "values");
    const uint32_t rank = world.rank(), size = world.size(), last = size - 1;
    store.barrier(60000);
    CHECK(store.all_sum(rank, 60000) == size * last / 2);
    const std::string own(rank, 'r');
    const std::vector<std::string> all = store.all_gather(own, 60000);
    CHECK(all.size() == size && all[last] == std::string(last, 'r'));
    CHECK(store.broadcast(rank == last ? "last" : "", last, 60000) == "last");
    const std::vector<std::string> gathered = store.gather(own, 0, 60000);
    CHECK(gathered.size() == (rank == 0 ? size : 0));
    CHECK(store.scatter(rank == 0 ? all : std::vector<std::string>(), 0, 60000) == own);
    try {
        const rcomm::StoreCollectives none(rcomm::Config(), "values", rank, size);
        CHECK(!"a configuration without a store is refused");
    } catch (const rcomm::Error &error) {
        CHECK(error.code() == RCOMM_INVALID_ARGUMENT);
    }
}

static void communicators(const rcomm::World &world, const rcomm::Group &group) {
    const rcomm::Stream stream = world.stream();
    const rcomm::Group on = group.on(stream);
    const rcomm::MemoryPool pool = world.memory_pool();
    void *segment = pool.allocate(64 * sizeof(float));
    pool.register_with(on);
    CHECK(pool.segments().find("\"bytes\":256") != std::string::npos);
    const rcomm::DeviceMemory<float> memory(stream, 64);
    memory.fill(std::vector<float>(64, 1.0f));
    on.reduce_scatter(memory.data(), static_cast<float *>(segment), 64 / group.size());
    on.all_gather(static_cast<float *>(segment), memory.data(), 64 / group.size());
    CHECK(memory.read() == std::vector<float>(64, static_cast<float>(group.size())));
    pool.deregister_from(on);
    pool.deallocate(segment);
    CHECK(pool.segments() == "[]");
    CHECK(!on.comm_memory().is_released);
    on.suspend();
    CHECK(on.comm_memory().is_released);
    on.resume();
    on.barrier();
}

int main() {
    rcomm::World world = rcomm::World::init(rcomm::Config().set("RCOMM_RING_ENTRIES", "4096"));
    world.phase("train");
    world.step(3);
    {
        const rcomm::Group group = world.group();
        collectives(group);
        errors(world);
        training(group);
        devices(world, group);
        symmetric(group);
        merges(world, group);
        control(world);
        values(world);
        communicators(world, group);
        const auto mesh = world.device_mesh({{"dp", world.size()}, {"tp", 1}});
        CHECK(mesh.size() == 2 && mesh[0].size() == world.size() && mesh[1].size() == 1);
        mesh[0].barrier();
        CHECK(world.snapshot().find("\"reducer_steps\"") != std::string::npos);
        CHECK(world.waits().find("\"rcomm.work\"") != std::string::npos);
        group.barrier();
    }
    world.shutdown();
    return 0;
}
