/* Streams and memory of devices: here those of a simulator of NCCL and the CUDA driver. */
#include <rcomm.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CODE(code, call) \
    do { \
        int32_t code_ = (call); \
        if (code_ != (code)) { \
            fprintf(stderr, "devices.c:%d: %s is %d: %s\n", __LINE__, #call, code_, rcomm_last_error()); \
            exit(1); \
        } \
    } while (0)
#define OK(call) CODE(RCOMM_OK, call)
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "devices.c:%d: %s\n", __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

enum { COUNT = 256 };
static const rcomm_reduction sum = {RCOMM_SUM, 1.0};
static uint32_t rank, size;

static void check_elements(const rcomm_device_memory *memory, float expected) {
    float elements[COUNT];
    OK(rcomm_device_read(memory, elements, COUNT));
    for (size_t at = 0; at < COUNT; at++) CHECK(elements[at] == expected);
}

/* Operations that are called with a handle on a stream take addresses of the device. */
static void operations(const rcomm_group *group, const rcomm_stream *stream, const rcomm_stream *other) {
    rcomm_group *on = NULL, *kept = NULL;
    OK(rcomm_group_on_stream(group, stream, &on));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_on_stream(group, NULL, &kept));
    rcomm_device_memory *memory = NULL, *parts = NULL;
    OK(rcomm_device_new(stream, COUNT, RCOMM_F32, &memory));
    check_elements(memory, 0.0f);
    float ones[COUNT];
    for (size_t at = 0; at < COUNT; at++) ones[at] = 1.0f;
    OK(rcomm_device_fill(memory, ones, COUNT));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_device_fill(memory, ones, COUNT - 1));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_device_read(memory, ones, COUNT - 1));
    void *at = NULL, *gathered = NULL;
    OK(rcomm_device_address(memory, &at));
    CHECK(at);

    OK(rcomm_all_reduce(on, at, COUNT, RCOMM_F32, sum, NULL));
    check_elements(memory, (float)size);
    rcomm_work *work = NULL;
    OK(rcomm_all_reduce(on, at, COUNT, RCOMM_F32, sum, &work));
    /* The streams wait, not the host; the check copies the elements on `stream`. */
    OK(rcomm_work_wait_stream(work, other));
    OK(rcomm_work_wait_stream(work, stream));
    check_elements(memory, (float)(size * size));
    OK(rcomm_work_wait(work));
    OK(rcomm_work_wait_stream(work, other));
    int32_t released = 0;
    OK(rcomm_work_released(work, &released));
    CHECK(released);
    rcomm_work_free(work);

    OK(rcomm_device_new(stream, (size_t)COUNT * size, RCOMM_F32, &parts));
    OK(rcomm_device_address(parts, &gathered));
    OK(rcomm_all_gather_single(on, at, gathered, COUNT, RCOMM_F32, NULL));
    float *all = calloc((size_t)COUNT * size, sizeof *all);
    CHECK(all);
    OK(rcomm_device_read(parts, all, (size_t)COUNT * size));
    CHECK(all[COUNT * size - 1] == (float)(size * size));
    free(all);

    /* Handles of that handle have the same memory. */
    OK(rcomm_group_on_terms(on, 30000, RCOMM_WAIT_LONG, &kept));
    OK(rcomm_broadcast(kept, at, COUNT, RCOMM_F32, 0, NULL));
    rcomm_group_free(kept);
    if (size > 1) {
        int32_t is_sender = rank == 0;
        if (is_sender) OK(rcomm_send(on, at, COUNT, RCOMM_F32, 1, 0, NULL));
        if (rank == 1) OK(rcomm_recv(on, gathered, COUNT, RCOMM_F32, 0, 0, NULL));
    }

    /* How long NCCL expects operations to take. */
    uint64_t expected = 0;
    OK(rcomm_start_coalescing(on));
    OK(rcomm_all_reduce(on, at, COUNT, RCOMM_F32, sum, NULL));
    OK(rcomm_estimate_coalesced(on, &expected));
    CHECK(expected > 0);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_estimate_coalesced(on, &expected));
    check_elements(memory, (float)(size * size));

    /* The host's memory is not the device's, and the group takes both with the right handle. */
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_all_reduce(on, ones, COUNT, RCOMM_F32, sum, NULL));
    OK(rcomm_all_reduce(group, ones, COUNT, RCOMM_F32, sum, &work));
    CODE(RCOMM_UNSUPPORTED, rcomm_work_wait_stream(work, stream));
    OK(rcomm_work_wait(work));
    rcomm_work_free(work);
    CHECK(ones[COUNT - 1] == (float)size);

    rcomm_device_free(parts);
    rcomm_device_free(memory);
    rcomm_device_free(NULL);
    rcomm_group_free(on);
}

/* A window of the device's memory, and puts and gets from there. */
static void window(const rcomm_group *group, const rcomm_stream *stream) {
    rcomm_group *on = NULL;
    OK(rcomm_group_on_stream(group, stream, &on));
    rcomm_device_memory *into = NULL, *from = NULL;
    OK(rcomm_device_new(stream, COUNT, RCOMM_F32, &into));
    OK(rcomm_device_new(stream, COUNT, RCOMM_F32, &from));
    float values[COUNT];
    for (size_t at = 0; at < COUNT; at++) values[at] = (float)(rank + 1);
    OK(rcomm_device_fill(from, values, COUNT));
    void *target = NULL, *source = NULL;
    OK(rcomm_device_address(into, &target));
    OK(rcomm_device_address(from, &source));
    rcomm_window *window = NULL;
    OK(rcomm_window_allocate(on, COUNT, RCOMM_F32, &window, NULL));
    uint32_t next = (rank + 1) % size, before = (rank + size - 1) % size;
    OK(rcomm_window_put(window, next, 0, source, COUNT, NULL));
    OK(rcomm_window_signal(window, next, NULL));
    OK(rcomm_window_wait_signal(window, before, NULL));
    OK(rcomm_window_get(window, rank, 0, target, COUNT, NULL));
    check_elements(into, (float)(before + 1));
    OK(rcomm_window_close(window));
    rcomm_device_free(into);
    rcomm_device_free(from);
    rcomm_group_free(on);
}

/* Memory of a pool is registered with the pool's groups, and operations take it by its address. */
static void pool(const rcomm_world *world, const rcomm_group *group, const rcomm_stream *stream) {
    rcomm_group *on = NULL;
    OK(rcomm_group_on_stream(group, stream, &on));
    rcomm_pool *made = NULL, *second = NULL;
    OK(rcomm_pool_new(world, &made));
    void *first = NULL, *later = NULL, *more = NULL;
    OK(rcomm_pool_allocate(made, COUNT * sizeof(float), &first));
    OK(rcomm_pool_register(made, on));
    OK(rcomm_pool_allocate(made, COUNT * sizeof(float), &later));
    CHECK(first && later && first != later);
    char *segments = NULL;
    OK(rcomm_pool_segments(made, &segments));
    CHECK(strstr(segments, "\"address\"") && strstr(segments, "\"bytes\":1024"));
    rcomm_text_free(segments);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_pool_allocate(made, 0, &more));

    rcomm_device_memory *source = NULL;
    void *at = NULL;
    OK(rcomm_device_new(stream, COUNT, RCOMM_F32, &source));
    OK(rcomm_device_address(source, &at));
    float ranks[COUNT];
    for (size_t place = 0; place < COUNT; place++) ranks[place] = (float)rank;
    OK(rcomm_device_fill(source, ranks, COUNT));
    /* The contents of a segment are undefined at first: the reduction writes them. */
    OK(rcomm_reduce_scatter_single(on, at, later, COUNT / size, RCOMM_F32, sum, NULL));
    OK(rcomm_all_gather_single(on, later, at, COUNT / size, RCOMM_F32, NULL));
    check_elements(source, (float)(size * (size - 1) / 2));
    rcomm_device_free(source);

    OK(rcomm_pool_deallocate(made, later));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_pool_deallocate(made, later));
    OK(rcomm_pool_deregister(made, on));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_pool_deregister(made, on));
    void *(*allocate)(ptrdiff_t, int, void *) = NULL;
    void (*release)(void *, ptrdiff_t, int, void *) = NULL;
    OK(rcomm_pool_install(made, &allocate, &release));
    OK(rcomm_pool_new(world, &second));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_pool_install(second, &allocate, &release));
    rcomm_pool_free(second);
    rcomm_pool_free(NULL);
    uint32_t device = 0;
    OK(rcomm_stream_device(stream, &device));
    void *taken = allocate(4096, (int)device, NULL);
    CHECK(taken);
    /* An installed pool outlives its handle. */
    rcomm_pool_free(made);
    release(taken, 4096, (int)device, NULL);
    taken = allocate(4096, (int)device, NULL);
    CHECK(taken);
    release(taken, 4096, (int)device, NULL);
    release(first, COUNT * sizeof(float), (int)device, NULL);
    rcomm_group_free(on);
}

/* The memory of communicators is released while the group is not used. */
static void suspension(const rcomm_group *group, const rcomm_stream *stream) {
    rcomm_group *on = NULL;
    OK(rcomm_group_on_stream(group, stream, &on));
    rcomm_device_memory *memory = NULL;
    void *at = NULL;
    OK(rcomm_device_new(stream, COUNT, RCOMM_F32, &memory));
    OK(rcomm_device_address(memory, &at));
    OK(rcomm_all_reduce(on, at, COUNT, RCOMM_F32, sum, NULL));
    rcomm_comm_memory before = {0}, now = {0};
    OK(rcomm_group_comm_memory(on, &before));
    CHECK(!before.is_released && before.releasable > 0 && before.total == before.releasable + before.persistent);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_comm_memory(on, NULL));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_resume(on));
    OK(rcomm_group_suspend(on));
    OK(rcomm_group_comm_memory(on, &now));
    CHECK(now.is_released);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_suspend(on));
    CHECK(rcomm_all_reduce(on, at, COUNT, RCOMM_F32, sum, NULL) != RCOMM_OK);
    OK(rcomm_group_resume(on));
    OK(rcomm_group_comm_memory(on, &now));
    CHECK(!now.is_released && now.total == before.total && now.persistent == before.persistent);
    OK(rcomm_all_reduce(on, at, COUNT, RCOMM_F32, sum, NULL));
    rcomm_device_free(memory);
    rcomm_group_free(on);
}

int main(void) {
    rcomm_world *world = NULL;
    rcomm_group *group = NULL;
    OK(rcomm_init(&world));
    OK(rcomm_world_place(world, &rank, &size));
    OK(rcomm_world_group(world, &group));
    rcomm_stream *stream = NULL, *other = NULL, *standard = NULL, *same = NULL;
    OK(rcomm_stream_new(world, 0, &stream));
    OK(rcomm_stream_new(world, 1, &other));
    OK(rcomm_stream_default(world, &standard));
    void *raw = NULL, *raw_again = NULL;
    OK(rcomm_stream_raw(stream, &raw));
    CHECK(raw);
    OK(rcomm_stream_borrow(world, raw, &same));
    OK(rcomm_stream_raw(same, &raw_again));
    CHECK(raw == raw_again);
    uint32_t ordinal = 9999;
    OK(rcomm_stream_device(same, &ordinal));
    CHECK(ordinal < 9999);
    rcomm_stream_free(same);
    operations(group, stream, other);
    operations(group, standard, other);
    window(group, stream);
    pool(world, group, stream);
    suspension(group, stream);
    OK(rcomm_stream_synchronize(stream));
    rcomm_stream_free(standard);
    rcomm_stream_free(other);
    rcomm_stream_free(stream);
    rcomm_stream_free(NULL);
    /* There may be no NVIDIA driver here. */
    char *links = NULL;
    int32_t found = rcomm_dma_connectivity(60000, &links);
    CHECK(found == RCOMM_BACKEND || found == RCOMM_OK);
    if (found == RCOMM_OK) CHECK(strstr(links, "\"bus_ids\""));
    rcomm_text_free(links);
    rcomm_group_free(group);
    OK(rcomm_shutdown(world));
    return 0;
}
