/* One rank without a device. With the headers beside this file, it calls the functions that need no device, and checks
 * their results. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <rcomm.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX 8

static void fail(int line, const char *failed) {
    fprintf(stderr, "ranks.c:%d: %s: %s\n", line, failed, rcomm_last_error());
    exit(1);
}

#define OK(call) do { if ((call) != RCOMM_OK) fail(__LINE__, #call); } while (0)
#define CODE(code, call) do { if ((call) != (code)) fail(__LINE__, #call); } while (0)
#define CHECK(condition) do { if (!(condition)) fail(__LINE__, #condition); } while (0)

static rcomm_group *group;
static uint32_t rank, size;
static const rcomm_reduction SUM = {RCOMM_SUM, 1.0};

/* Waits for an operation, which must succeed. */
static void await(rcomm_work *work) {
    int32_t ended = 0;
    while (!ended) OK(rcomm_work_test(work, 1000, &ended));
    OK(rcomm_work_wait(work));
}

/* Waits for an operation that produces no value, and frees its handle. */
static void finish(rcomm_work *work) {
    int32_t released = 0;
    await(work);
    OK(rcomm_work_released(work, &released));
    CHECK(released == 1);
    rcomm_work_free(work);
}

static void reductions(void) {
    float sum[2] = {1.0f, (float)rank};
    float ranks = (float)(size * (size - 1) / 2);
    OK(rcomm_all_reduce(group, sum, 2, RCOMM_F32, SUM, NULL));
    CHECK(sum[0] == (float)size && sum[1] == ranks);

    double half[1] = {2.0};
    rcomm_reduction premul = {RCOMM_PREMUL_SUM, 0.5};
    rcomm_work *work = NULL;
    OK(rcomm_all_reduce(group, half, 1, RCOMM_F64, premul, &work));
    finish(work);
    CHECK(half[0] == (double)size);

    int32_t highest = (int32_t)rank;
    rcomm_reduction max = {RCOMM_MAX, 1.0};
    OK(rcomm_reduce(group, &highest, 1, RCOMM_I32, max, 0, NULL));
    CHECK(highest == (rank == 0 ? (int32_t)size - 1 : (int32_t)rank));

    uint8_t first = 1, second[2] = {2, 3};
    void *both[] = {&first, second};
    size_t counts[] = {1, 2};
    OK(rcomm_all_reduce_coalesced(group, both, counts, 2, RCOMM_U8, SUM, NULL));
    CHECK(first == size && second[0] == 2 * size && second[1] == 3 * size);

    int64_t parts[MAX], own;
    for (uint32_t r = 0; r < size; r++) parts[r] = r;
    OK(rcomm_reduce_scatter_single(group, parts, &own, 1, RCOMM_I64, SUM, NULL));
    CHECK(own == (int64_t)(rank * size));

    const void *list[MAX];
    size_t lens[MAX];
    for (uint32_t r = 0; r < size; r++) { list[r] = &parts[r]; lens[r] = 1; }
    OK(rcomm_reduce_scatter(group, list, &own, 1, RCOMM_I64, SUM, NULL));
    CHECK(own == (int64_t)(rank * size));
    own = -1;
    OK(rcomm_reduce_scatter_v(group, list, &own, lens, RCOMM_I64, SUM, NULL));
    CHECK(own == (int64_t)(rank * size));
    own = -1;
    const void *inputs[] = {parts};
    void *outputs[] = {&own};
    OK(rcomm_reduce_scatter_coalesced(group, inputs, outputs, lens, 1, RCOMM_I64, SUM, NULL));
    CHECK(own == (int64_t)(rank * size));
}

static void gathers(void) {
    uint32_t own = rank + 10, all[MAX], each[MAX];
    void *outputs[MAX];
    const void *inputs[MAX];
    size_t ones[MAX];
    for (uint32_t r = 0; r < size; r++) { outputs[r] = &each[r]; inputs[r] = &all[r]; ones[r] = 1; }
    OK(rcomm_all_gather_single(group, &own, all, 1, RCOMM_U32, NULL));
    for (uint32_t r = 0; r < size; r++) CHECK(all[r] == r + 10);

#define GATHERED(when) for (uint32_t r = 0; r < size; r++) { if (when) CHECK(each[r] == r + 10); each[r] = 0; }
    OK(rcomm_all_gather(group, &own, outputs, 1, RCOMM_U32, NULL));
    GATHERED(true);
    OK(rcomm_all_gather_v(group, &own, outputs, ones, RCOMM_U32, NULL));
    GATHERED(true);
    OK(rcomm_gather(group, &own, outputs, 1, RCOMM_U32, 0, NULL));
    GATHERED(rank == 0);
    OK(rcomm_gather_v(group, &own, outputs, ones, RCOMM_U32, 0, NULL));
    GATHERED(rank == 0);

    const void *one[] = {&own};
    void *wide[] = {all};
    memset(all, 0, sizeof all);
    OK(rcomm_all_gather_coalesced(group, one, wide, ones, 1, RCOMM_U32, NULL));
    for (uint32_t r = 0; r < size; r++) CHECK(all[r] == r + 10);

    uint32_t part = 0;
    OK(rcomm_scatter(group, inputs, &part, 1, RCOMM_U32, 0, NULL));
    CHECK(part == rank + 10);
    part = 0;
    OK(rcomm_scatter_v(group, inputs, &part, ones, RCOMM_U32, 0, NULL));
    CHECK(part == rank + 10);
    uint16_t value = (uint16_t)(rank == 0 ? 77 : 0);
    OK(rcomm_broadcast(group, &value, 1, RCOMM_U16, 0, NULL));
    CHECK(value == 77);
}

static void exchanges(void) {
    uint8_t out[MAX], in[MAX];
    size_t ones[MAX];
    const void *inputs[MAX];
    void *outputs[MAX];
    for (uint32_t r = 0; r < size; r++) {
        out[r] = (uint8_t)(10 * rank + r);
        ones[r] = 1;
        inputs[r] = &out[r];
        outputs[r] = &in[r];
    }
#define SWAPPED() for (uint32_t r = 0; r < size; r++) { CHECK(in[r] == 10 * r + rank); in[r] = 0; }
    OK(rcomm_all_to_all_single(group, out, in, 1, RCOMM_U8, NULL));
    SWAPPED();
    OK(rcomm_all_to_all_v_single(group, out, ones, in, ones, RCOMM_U8, NULL));
    SWAPPED();
    OK(rcomm_all_to_all(group, inputs, ones, outputs, ones, RCOMM_U8, NULL));
    SWAPPED();
}

static void messages(void) {
    if (size == 1) return;
    uint32_t next = (rank + 1) % size, before = (rank + size - 1) % size;
    uint32_t mine = rank, theirs = 99;
    rcomm_work *sent = NULL, *got = NULL;
    OK(rcomm_send(group, &mine, 1, RCOMM_U32, next, 5, &sent));
    OK(rcomm_recv(group, &theirs, 1, RCOMM_U32, before, 5, NULL));
    CHECK(theirs == before);
    finish(sent);

    theirs = 99;
    rcomm_message batch[] = {
        {0, &theirs, 1, RCOMM_U32, before, 6},
        {1, &mine, 1, RCOMM_U32, next, 6},
    };
    OK(rcomm_batch_isend_irecv(group, batch, 2, NULL));
    CHECK(theirs == before);

    uint32_t source = 99;
    OK(rcomm_send(group, &mine, 1, RCOMM_U32, next, 7, &sent));
    OK(rcomm_recv_any(group, &theirs, 1, RCOMM_U32, 7, NULL, &got));
    OK(rcomm_work_wait(got));
    OK(rcomm_work_source(got, &source));
    CHECK(source == before && theirs == before);
    finish(got);
    finish(sent);
    OK(rcomm_send(group, &mine, 1, RCOMM_U32, next, 8, &sent));
    OK(rcomm_recv_any(group, &theirs, 1, RCOMM_U32, 8, &source, NULL));
    CHECK(source == before);
    finish(sent);
}

/* Every rank puts its number + 1 into the element of its number in the next rank's part. */
static void put_around(rcomm_window *window, bool with_handles) {
    uint32_t next = (rank + 1) % size, before = (rank + size - 1) % size;
    uint32_t mine = rank + 1, theirs[MAX] = {0};
    size_t count = 0;
    OK(rcomm_window_count(window, next, &count));
    CHECK(count == size);
    if (with_handles) {
        rcomm_work *waited = NULL, *put = NULL, *signal = NULL, *got = NULL;
        OK(rcomm_window_wait_signal(window, before, &waited));
        OK(rcomm_window_put(window, next, rank, &mine, 1, &put));
        OK(rcomm_window_signal(window, next, &signal));
        finish(waited);
        finish(put);
        finish(signal);
        OK(rcomm_window_get(window, rank, 0, theirs, size, &got));
        finish(got);
    } else {
        OK(rcomm_window_put(window, next, rank, &mine, 1, NULL));
        OK(rcomm_window_signal(window, next, NULL));
        OK(rcomm_window_wait_signal(window, before, NULL));
        OK(rcomm_window_get(window, rank, 0, theirs, size, NULL));
    }
    for (uint32_t r = 0; r < size; r++) CHECK(theirs[r] == (r == before ? r + 1 : 0));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_window_put(window, next, size, &mine, 1, NULL));
    CHECK(strstr(rcomm_last_error(), "reach beyond"));
}

static void windows(void) {
    rcomm_window *window = NULL;
    OK(rcomm_window_allocate(group, size, RCOMM_U32, &window, NULL));
    put_around(window, false);
    void *start = NULL;
    size_t bytes = 0;
    OK(rcomm_window_map(window, rank, &start, &bytes));
    CHECK(bytes == size * sizeof(uint32_t));
    CHECK(((uint32_t *)start)[(rank + size - 1) % size] == (rank + size - 1) % size + 1);
    OK(rcomm_window_close(window));

    uint32_t own[MAX] = {0};
    rcomm_work *work = NULL;
    int32_t released = 1;
    OK(rcomm_new_window(group, own, size, RCOMM_U32, NULL, &work));
    await(work);
    OK(rcomm_work_released(work, &released));
    CHECK(released == 0);
    OK(rcomm_work_window(work, &window));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_work_window(work, &window));
    rcomm_work_free(work);
    put_around(window, true);
    OK(rcomm_window_close(window));
    CHECK(own[(rank + size - 1) % size] == (rank + size - 1) % size + 1);
    rcomm_window_free(NULL);
}

static void sparse(void) {
    /* A tensor of five rows with two columns: every rank has row 1, and only rank 0 has row 2. */
    uint64_t shape[] = {5, 2};
    int64_t rows[] = {1, 2};
    float blocks[] = {1, 2, 3, 4};
    size_t nnz = 0;
    const int64_t *indices = NULL;
    const void *values = NULL;
    rcomm_sparse *sum = NULL;
    OK(rcomm_all_reduce_sparse(group, shape, 2, 1, rows, blocks, rank == 0 ? 2 : 1, RCOMM_F32, &sum, NULL));
    OK(rcomm_sparse_get(sum, &nnz, &indices, &values));
    CHECK(nnz == 2 && indices[0] == 1 && indices[1] == 2);
    const float *sums = values;
    CHECK(sums[0] == (float)size && sums[1] == 2 * (float)size && sums[2] == 3 && sums[3] == 4);
    rcomm_sparse_free(sum);
    rcomm_sparse_free(NULL);

    rcomm_work *work = NULL;
    /* A sum that nothing would take is refused before any other rank takes part. */
    CODE(RCOMM_INVALID_ARGUMENT,
         rcomm_all_reduce_sparse(group, shape, 2, 1, rows, blocks, 1, RCOMM_F32, NULL, NULL));
    OK(rcomm_all_reduce_sparse(group, shape, 2, 1, rows, blocks, 1, RCOMM_F32, NULL, &work));
    await(work);
    OK(rcomm_work_sparse(work, &sum));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_work_sparse(work, &sum));
    CHECK(strstr(rcomm_last_error(), "taken before"));
    rcomm_work_free(work);
    OK(rcomm_sparse_get(sum, &nnz, NULL, &values));
    CHECK(nnz == 1 && ((const float *)values)[1] == 2 * (float)size);
    rcomm_sparse_free(sum);
    rows[0] = 5;
    CODE(RCOMM_INVALID_ARGUMENT,
         rcomm_all_reduce_sparse(group, shape, 2, 1, rows, blocks, 1, RCOMM_F32, &sum, NULL));
    CHECK(strstr(rcomm_last_error(), "index 5 is not in dimension 0"));
}

/* Compares a text and frees it. */
static void is_text(char *got, const char *expected) {
    if (strcmp(got, expected) != 0) {
        fprintf(stderr, "%s is not %s\n", got, expected);
        exit(1);
    }
    rcomm_text_free(got);
}

static void objects(void) {
    char mine[64], all[256] = "[", *text = NULL;
    snprintf(mine, sizeof mine, "{\"rank\":%u}", rank);
    for (uint32_t r = 0; r < size; r++)
        snprintf(all + strlen(all), 64, "%s{\"rank\":%u}", r ? "," : "", r);
    strcat(all, "]");
    OK(rcomm_all_gather_object(group, mine, &text, NULL));
    is_text(text, all);
    OK(rcomm_gather_object(group, mine, 0, &text, NULL));
    is_text(text, rank == 0 ? all : "null");
    OK(rcomm_scatter_object(group, rank == 0 ? all : NULL, 0, &text, NULL));
    is_text(text, mine);
    OK(rcomm_broadcast_object(group, rank == 0 ? "[1,\"two\"]" : NULL, 0, &text, NULL));
    is_text(text, "[1,\"two\"]");
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_all_gather_object(group, "{", &text, NULL));
    CHECK(strstr(rcomm_last_error(), "the value is not JSON"));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_all_gather_object(group, mine, NULL, NULL));

    rcomm_work *works[4];
    OK(rcomm_all_gather_object(group, mine, NULL, &works[0]));
    OK(rcomm_gather_object(group, mine, 0, NULL, &works[1]));
    OK(rcomm_scatter_object(group, rank == 0 ? all : NULL, 0, NULL, &works[2]));
    OK(rcomm_broadcast_object(group, rank == 0 ? "7" : NULL, 0, NULL, &works[3]));
    const char *expected[] = {all, rank == 0 ? all : "null", mine, "7"};
    for (int at = 3; at >= 0; at--) {
        await(works[at]);
        OK(rcomm_work_text(works[at], &text));
        is_text(text, expected[at]);
        CODE(RCOMM_INVALID_ARGUMENT, rcomm_work_text(works[at], &text));
        rcomm_work_free(works[at]);
    }
    if (size > 1 && rank == 0) {
        OK(rcomm_send_object(group, "true", 1, 9, NULL));
        OK(rcomm_send_object(group, "false", 1, 9, &works[0]));
        finish(works[0]);
    }
    if (rank == 1) {
        OK(rcomm_recv_object(group, 0, 9, NULL, &works[0]));
        OK(rcomm_recv_object(group, 0, 9, &text, NULL));
        is_text(text, "false");
        await(works[0]);
        OK(rcomm_work_text(works[0], &text));
        is_text(text, "true");
        rcomm_work_free(works[0]);
    }
    rcomm_text_free(NULL);
}

static void refusals(void) {
    /* There is no device here. */
    rcomm_comm_memory memory = {0};
    CODE(RCOMM_UNSUPPORTED, rcomm_group_suspend(group));
    CHECK(strstr(rcomm_last_error(), "no backend for the memory of devices"));
    CODE(RCOMM_UNSUPPORTED, rcomm_group_resume(group));
    CODE(RCOMM_UNSUPPORTED, rcomm_group_comm_memory(group, &memory));
    float number = 1.0f;
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_broadcast(group, &number, 1, RCOMM_F32, size, NULL));
    CHECK(strstr(rcomm_last_error(), "is not in a group of"));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_broadcast(group, &number, 1, 200, 0, NULL));
    CHECK(strstr(rcomm_last_error(), "no element type has the code 200"));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_all_reduce(group, NULL, 1, RCOMM_F32, SUM, NULL));
    CHECK(strstr(rcomm_last_error(), "the buffer for 1 elements of Float is NULL"));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_barrier(NULL, NULL));
    CHECK(strstr(rcomm_last_error(), "the group is NULL"));
    rcomm_reduction bits = {RCOMM_BAND, 1.0};
    CODE(RCOMM_UNSUPPORTED, rcomm_all_reduce(group, &number, 1, RCOMM_F32, bits, NULL));
    CHECK(strstr(rcomm_last_error(), "band is not defined"));
    OK(rcomm_all_reduce(group, NULL, 0, RCOMM_F32, SUM, NULL));
}

static void groups(rcomm_world *world) {
    uint32_t in_part = 99, part_size = 0;
    rcomm_group *part = NULL;
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_split(group, (int64_t)UINT32_MAX + 1, 0, "large", &part));
    CHECK(strstr(rcomm_last_error(), "the color 4294967296 is above 4294967295"));
    OK(rcomm_split(group, rank == 0 ? -1 : (int64_t)UINT32_MAX, -(int64_t)rank, "rest", &part));
    CHECK((part == NULL) == (rank == 0));
    if (part) {
        OK(rcomm_group_place(part, &in_part, &part_size));
        CHECK(in_part == size - 1 - rank && part_size == size - 1);
        OK(rcomm_group_destroy(part));
    }
    uint32_t only[] = {rank};
    OK(rcomm_new_group(world, only, 1, "alone", &part));
    uint64_t timeout_ms = 0;
    OK(rcomm_group_set_timeout(part, 5000));
    OK(rcomm_group_timeout(part, &timeout_ms));
    CHECK(timeout_ms == 5000);
    OK(rcomm_barrier(part, NULL));
    OK(rcomm_monitored_barrier(part, 1, NULL));
    OK(rcomm_group_abort(part, "enough"));
    CODE(RCOMM_ABORTED, rcomm_barrier(part, NULL));
    CHECK(strstr(rcomm_last_error(), "enough"));
    rcomm_group_free(part);
    rcomm_group_free(NULL);
    rcomm_work_free(NULL);
    rcomm_world_free(NULL);
}

/* Options apply to the operations called with their handle; a monitored barrier that fails leaves the group usable. */
static void options(void) {
    rcomm_group *brief = NULL;
    uint64_t timeout_ms = 0, usual_ms = 0;
    rcomm_work *work = NULL;
    OK(rcomm_group_timeout(group, &usual_ms));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_on_terms(group, 0, 9, &brief));
    CHECK(strstr(rcomm_last_error(), "no wait hint has the code 9"));
    /* Long enough for a slow rank; the last rank deliberately arrives after it. */
    OK(rcomm_group_on_terms(group, 3000, RCOMM_WAIT_LONG, &brief));
    OK(rcomm_group_timeout(brief, &timeout_ms));
    CHECK(timeout_ms == 3000);
    OK(rcomm_group_timeout(group, &timeout_ms));
    CHECK(timeout_ms == usual_ms);
    OK(rcomm_barrier(group, NULL));
    if (rank + 1 < size) {
        OK(rcomm_monitored_barrier(brief, 1, &work));
        CODE(RCOMM_TIMEOUT, rcomm_work_wait(work));
        char missed[64];
        snprintf(missed, sizeof missed, "rank %u did not arrive within", size - 1);
        CHECK(strstr(rcomm_last_error(), missed));
        rcomm_work_free(work);
    } else if (size > 1) {
        /* The last rank arrives after rank 0 has given up, and gets the same error. */
        char *text = NULL;
        OK(rcomm_recv_object(group, 0, 1, &text, NULL));
        rcomm_text_free(text);
        CODE(RCOMM_TIMEOUT, rcomm_monitored_barrier(brief, 1, NULL));
    }
    if (size > 1 && rank == 0) OK(rcomm_send_object(group, "\"given up\"", size - 1, 1, NULL));
    rcomm_group_free(brief);
    OK(rcomm_group_on_terms(group, 0, RCOMM_WAIT_SHORT, &brief));
    OK(rcomm_group_extend_timeout(group, 1000));
    OK(rcomm_barrier(brief, NULL));
    OK(rcomm_monitored_barrier(brief, 0, &work));
    finish(work);
    rcomm_group_free(brief);
}

/* An operation that is pending when its group is aborted ends with the reason. */
static void abort_work(rcomm_world *world) {
    if (size == 1) return;
    uint32_t all[MAX];
    for (uint32_t r = 0; r < size; r++) all[r] = r;
    rcomm_group *doomed = NULL;
    OK(rcomm_new_group(world, all, size, "doomed", &doomed));
    if (rank == 0) {
        float number = 1.0f;
        rcomm_work *work = NULL;
        OK(rcomm_all_reduce(doomed, &number, 1, RCOMM_F32, SUM, &work));
        OK(rcomm_work_abort(work, "no longer wanted"));
        CODE(RCOMM_ABORTED, rcomm_work_wait(work));
        CHECK(strstr(rcomm_last_error(), "no longer wanted"));
        int32_t ended = 0;
        CODE(RCOMM_ABORTED, rcomm_work_test(work, 0, &ended));
        CHECK(ended == 1);
        rcomm_work_free(work);
    }
    rcomm_group_free(doomed);
}

/* The input or the output is this rank's own part of the other buffer, as NCCL allows it. */
static void in_place(void) {
    uint32_t all[MAX] = {0};
    all[rank] = rank + 10;
    OK(rcomm_all_gather_single(group, &all[rank], all, 1, RCOMM_U32, NULL));
    for (uint32_t r = 0; r < size; r++) CHECK(all[r] == r + 10);
    int64_t parts[MAX];
    rcomm_work *work = NULL;
    for (uint32_t r = 0; r < size; r++) parts[r] = r + 1;
    OK(rcomm_reduce_scatter_single(group, parts, &parts[rank], 1, RCOMM_I64, SUM, &work));
    finish(work);
    for (uint32_t r = 0; r < size; r++) CHECK(parts[r] == (r == rank ? size * (r + 1) : r + 1));
    if (size == 1) return;
    /* Any other overlap is refused. */
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_all_gather_single(group, &all[(rank + 1) % size], all, 1, RCOMM_U32, NULL));
    CHECK(strstr(rcomm_last_error(), "overlap by 4 bytes"));
}

/* Operations of several kinds and types are issued as one. */
static void coalesced(void) {
    float sum = 1.0f;
    int64_t sent = rank == 0 ? 77 : 0;
    uint8_t own = (uint8_t)rank, all[MAX];
    rcomm_work *work = NULL;
    for (int with_handle = 0; with_handle < 2; with_handle++) {
        sum = 1.0f;
        OK(rcomm_start_coalescing(group));
        CODE(RCOMM_INVALID_ARGUMENT, rcomm_start_coalescing(group));
        OK(rcomm_all_reduce(group, &sum, 1, RCOMM_F32, SUM, NULL));
        OK(rcomm_broadcast(group, &sent, 1, RCOMM_I64, 0, NULL));
        OK(rcomm_all_gather_single(group, &own, all, 1, RCOMM_U8, NULL));
        CODE(RCOMM_INVALID_ARGUMENT, rcomm_barrier(group, &work));
        CHECK(strstr(rcomm_last_error(), "no work of its own"));
        CHECK(sum == 1.0f);
        OK(rcomm_end_coalescing(group, with_handle ? &work : NULL));
        if (with_handle) finish(work);
        CHECK(sum == (float)size && sent == 77 && all[size - 1] == size - 1);
    }
    OK(rcomm_start_coalescing(group));
    OK(rcomm_end_coalescing(group, &work));
    CHECK(work == NULL);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_end_coalescing(group, NULL));
}

static void *wait_for(void *work) {
    OK(rcomm_work_wait(work));
    return NULL;
}

static void count(void *context, int32_t code) {
    CHECK(code == RCOMM_OK);
    atomic_fetch_add((atomic_int *)context, 1);
}

static void release(void *owner) { atomic_fetch_add((atomic_int *)owner, 1); }

/* Waits until a counter has this value, for a minute at most. */
static void await_count(atomic_int *counter, int value) {
    struct timespec pause = {0, 1000000};
    for (int i = 0; i < 60000 && atomic_load(counter) != value; i++) nanosleep(&pause, NULL);
    CHECK(atomic_load(counter) == value);
}

/* A thread waits for an operation, and another one tests it; callbacks are called and owners released, once. */
static void tests_while_another_waits(void) {
    atomic_int called = 0, released = 0;
    float number = 1.0f;
    uint32_t token = 0;
    rcomm_group *kept = NULL;
    rcomm_work *work = NULL;
    OK(rcomm_group_keeping(group, &released, release, &kept));
    if (rank != 0) {
        /* Rank 0 has tested its operation before it sends this. */
        OK(rcomm_recv(group, &token, 1, RCOMM_U32, 0, 9, NULL));
    }
    OK(rcomm_all_reduce(kept, &number, 1, RCOMM_F32, SUM, &work));
    rcomm_group_free(kept);
    OK(rcomm_work_on_completion(work, count, &called));
    pthread_t waiting;
    CHECK(pthread_create(&waiting, NULL, wait_for, work) == 0);
    if (rank == 0 && size > 1) {
        int32_t ended = 1, free_to_use = 1;
        for (int i = 0; i < 100; i++) {
            OK(rcomm_work_test(work, 0, &ended));
            CHECK(ended == 0);
            OK(rcomm_work_released(work, &free_to_use));
            CHECK(free_to_use == 0);
        }
        CHECK(atomic_load(&called) == 0 && atomic_load(&released) == 0);
        for (uint32_t r = 1; r < size; r++) OK(rcomm_send(group, &token, 1, RCOMM_U32, r, 9, NULL));
    }
    CHECK(pthread_join(waiting, NULL) == 0);
    CHECK(number == (float)size);
    await_count(&called, 1);
    await_count(&released, 1);
    OK(rcomm_work_on_completion(work, count, &called));
    CHECK(atomic_load(&called) == 2);
    finish(work);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_keeping(group, NULL, NULL, &kept));
}

/* What a hook has seen. */
struct seen {
    atomic_int begun, ended;
};

static void hook_begun(void *context, const rcomm_hooked_operation *operation) {
    struct seen *seen = context;
    CHECK(strlen(operation->group) > 0 && operation->record_id > 0 && operation->timeout_ms > 0);
    bool is_message = strcmp(operation->op, "send") == 0 || strcmp(operation->op, "recv") == 0;
    CHECK(is_message || strcmp(operation->op, "all_reduce") == 0);
    CHECK(operation->is_p2p == is_message && operation->seq == 1);
    atomic_fetch_add(&seen->begun, 1);
}

static void hook_ended(void *context, const rcomm_hooked_operation *operation, int32_t code) {
    struct seen *seen = context;
    CHECK(code == RCOMM_OK && operation->seq == 1);
    atomic_fetch_add(&seen->ended, 1);
}

/* A hook sees exactly the operations of its group begin and end, blocking or not. It stays until the group ends. */
static void hooks(void) {
    static struct seen seen;
    rcomm_group *hooked = NULL;
    rcomm_work *work = NULL;
    float number = 1.0f;
    uint32_t token = 0;
    OK(rcomm_split(group, 0, rank, "hooked", &hooked));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_set_hook(hooked, NULL, NULL, &seen));
    OK(rcomm_group_set_hook(hooked, hook_begun, hook_ended, &seen));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_set_hook(hooked, hook_begun, NULL, &seen));
    OK(rcomm_all_reduce(hooked, &number, 1, RCOMM_F32, SUM, &work));
    finish(work);
    int expected = 1;
    if (size > 1 && rank < 2) {
        if (rank == 0) OK(rcomm_send(hooked, &token, 1, RCOMM_U32, 1, 0, NULL));
        else OK(rcomm_recv(hooked, &token, 1, RCOMM_U32, 0, 0, NULL));
        expected = 2;
    }
    OK(rcomm_barrier(group, NULL));
    await_count(&seen.ended, expected);
    CHECK(atomic_load(&seen.begun) == expected);
    rcomm_group_free(hooked);
}

/* The texts that a rank writes about itself. */
static void records(rcomm_world *world) {
    char *text = NULL;
    OK(rcomm_phase(world, "load data"));
    OK(rcomm_step(world, 41));
    OK(rcomm_snapshot(world, &text));
    CHECK(strstr(text, "load data") && strstr(text, "41") && strstr(text, "all_reduce"));
    rcomm_text_free(text);
    OK(rcomm_phase(world, ""));
    OK(rcomm_group_status(group, &text));
    CHECK(strstr(text, "\"last_completed\":") && strstr(text, "\"refused\":null"));
    rcomm_text_free(text);
    OK(rcomm_dump(world, NULL));
    OK(rcomm_dump(world, &text));
    FILE *dump = fopen(text, "r");
    CHECK(dump);
    fclose(dump);
    rcomm_text_free(text);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_snapshot(world, NULL));
}

/* Groups of a mesh, shared, of one rank each, merged, and found by name; then settings of all groups of a world. */
static void more_groups(rcomm_world *world) {
    uint32_t all[MAX], in_tp = 9, in_dp = 9, merged_size = 0;
    for (uint32_t r = 0; r < size; r++) all[r] = r;
    const char *names[] = {"dp", "tp"};
    uint32_t sizes[] = {size, 1};
    rcomm_group *mesh[2] = {NULL, NULL}, *one = NULL, *same = NULL, *merged = NULL, *alone = NULL;
    OK(rcomm_device_mesh(world, names, sizes, 2, mesh));
    OK(rcomm_group_place(mesh[0], NULL, &in_dp));
    OK(rcomm_group_place(mesh[1], NULL, &in_tp));
    CHECK(in_dp == size && in_tp == 1);
    sizes[1] = 2;
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_device_mesh(world, names, sizes, 2, mesh));
    OK(rcomm_shared_group(world, all, size, "shared", &one));
    OK(rcomm_shared_group(world, all, size, "shared", &same));
    OK(rcomm_barrier(one, NULL));
    OK(rcomm_barrier(same, NULL));
    /* It is the same group: what is set by one handle is set for the other. */
    uint64_t timeout_ms = 0;
    OK(rcomm_group_set_timeout(one, 29000));
    OK(rcomm_group_timeout(same, &timeout_ms));
    CHECK(timeout_ms == 29000);
    OK(rcomm_new_subgroups(group, 1, "own", &alone));
    OK(rcomm_merge(world, alone, size, "merged", &merged));
    OK(rcomm_group_place(merged, NULL, &merged_size));
    CHECK(merged_size == size);
    rcomm_group *found = NULL;
    OK(rcomm_group_named(world, "shared", &found));
    CHECK(found);
    rcomm_group_free(found);
    OK(rcomm_group_named(world, "no such group", &found));
    CHECK(!found);

    OK(rcomm_set_timeouts(world, 31000));
    OK(rcomm_extend_timeouts(world, 1000));
    OK(rcomm_group_timeout(merged, &timeout_ms));
    CHECK(timeout_ms == 31000);
    OK(rcomm_set_timing(world, 1));
    rcomm_work *work = NULL;
    float number = 1.0f;
    OK(rcomm_all_reduce(merged, &number, 1, RCOMM_F32, SUM, &work));
    OK(rcomm_wait_for_pending(world, 30000));
    finish(work);
    char *json = NULL;
    OK(rcomm_snapshot(world, &json));
    CHECK(strstr(json, "\"duration_ms\""));
    rcomm_text_free(json);
    OK(rcomm_waits(world, &json));
    CHECK(strstr(json, "{\"name\":\"rcomm.rendezvous\",\"count\":1,"));
    rcomm_text_free(json);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_waits(world, NULL));
    OK(rcomm_set_timing(world, 0));
    OK(rcomm_group_set_timing(merged, 0));
    rcomm_group *made[] = {mesh[0], mesh[1], one, same, merged, alone};
    for (size_t at = 0; at < sizeof made / sizeof made[0]; at++) rcomm_group_free(made[at]);
}

static void reducers(rcomm_world *world) {
    uint32_t all[MAX];
    for (uint32_t r = 0; r < size; r++) all[r] = r;
    rcomm_group *dp = NULL;
    OK(rcomm_new_group(world, all, size, "dp", &dp));
    const char *names[] = {"hidden", "output"};
    uint64_t lens[] = {5, 2};
    rcomm_reducer *reducer = NULL;
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_reducer_new(dp, names, lens, 2, RCOMM_I32, 0, 0, 0, &reducer));
    OK(rcomm_reducer_new(dp, names, lens, 2, RCOMM_F32, 8, 8, 0, &reducer));
    for (int step = 1; step < 4; step++) {
        OK(rcomm_reducer_begin_forward(reducer));
        for (size_t parameter = 2; parameter-- > 0;) {
            void *gradient = NULL;
            size_t len = 0;
            OK(rcomm_reducer_gradient(reducer, parameter, &gradient, &len));
            CHECK(len == lens[parameter]);
            for (size_t at = 0; at < len; at++) ((float *)gradient)[at] = (float)(step * (int)(rank + 1));
            OK(rcomm_reducer_ready(reducer, parameter));
            CODE(RCOMM_INVALID_ARGUMENT, rcomm_reducer_ready(reducer, parameter));
        }
        OK(rcomm_reducer_finish(reducer));
        void *average = NULL;
        size_t len = 0;
        OK(rcomm_reducer_average(reducer, 0, &average, &len));
        CHECK(len == 5 && ((float *)average)[4] == (float)step * (float)(size + 1) / 2.0f);
        OK(rcomm_reducer_average(reducer, 7, &average, &len));
        CHECK(!average && len == 0);
    }
    char *json = NULL;
    OK(rcomm_reducer_statistics(reducer, &json));
    CHECK(strstr(json, "\"step\":3") && strstr(json, "\"exposed_ms\""));
    rcomm_text_free(json);
    OK(rcomm_reducer_regroup(reducer, group));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_reducer_finish(reducer));
    rcomm_reducer_free(reducer);
    rcomm_group_free(dp);
}

/* Fills a dense parameter's gradient with `value`, and says that it is complete. */
static void give_gradient(rcomm_reducer *reducer, size_t parameter, float value) {
    void *gradient = NULL;
    size_t len = 0;
    OK(rcomm_reducer_gradient(reducer, parameter, &gradient, &len));
    for (size_t at = 0; at < len; at++) ((float *)gradient)[at] = value;
    OK(rcomm_reducer_ready(reducer, parameter));
}

/* Checks the last element of a parameter's average. */
static void check_average(rcomm_reducer *reducer, size_t parameter, float expected, float tolerance) {
    void *average = NULL;
    size_t len = 0;
    OK(rcomm_reducer_average(reducer, parameter, &average, &len));
    CHECK(average && len > 0);
    float difference = ((float *)average)[len - 1] - expected;
    CHECK(difference <= tolerance && difference >= -tolerance);
}

static void reducer_options(rcomm_world *world) {
    uint32_t all[MAX];
    for (uint32_t r = 0; r < size; r++) all[r] = r;
    rcomm_group *dp = NULL;
    OK(rcomm_new_group(world, all, size, "options", &dp));
    float mean = (float)(size + 1) / 2.0f;
    const char *names[] = {"embedding", "output"};
    uint64_t lens[] = {6, 2};
    rcomm_reducer *reducer = NULL;
    const char *wrong[] = {"{", "[1]", "{\"wirr\":\"f16\"}", "{\"wire\":\"f8\"}", "{\"shapes\":[[6],[3]]}",
                           "{\"hook\":{\"power_sgd\":{}}}", "{\"hook\":{\"batched_power_sgd\":{\"rank\":0}}}",
                           "{\"hook\":{\"post_local_sgd\":{\"rank\":1}}}", "{\"delayed\":[2]}"};
    for (size_t at = 0; at < sizeof wrong / sizeof wrong[0]; at++) {
        CODE(RCOMM_INVALID_ARGUMENT, rcomm_reducer_new_with(dp, names, lens, 2, RCOMM_F32, wrong[at], &reducer));
    }

    /* The gradient of the first parameter is sparse: it is given as rows. */
    const char *rows = "{\"shapes\":[[3,2],[2]],\"sparse\":[0],\"bucket_bytes\":8}";
    OK(rcomm_reducer_new_with(dp, names, lens, 2, RCOMM_F32, rows, &reducer));
    give_gradient(reducer, 1, (float)(rank + 1));
    int64_t row = 1;
    float values[] = {(float)(rank + 1), 2.0f};
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_reducer_ready_sparse(reducer, 1, &row, values, 1));
    OK(rcomm_reducer_ready_sparse(reducer, 0, &row, values, 1));
    OK(rcomm_reducer_finish(reducer));
    check_average(reducer, 1, mean, 0.0f);
    rcomm_sparse *average = NULL;
    OK(rcomm_reducer_sparse_average(reducer, 0, &average));
    size_t nnz = 0;
    const int64_t *indices = NULL;
    const void *sums = NULL;
    OK(rcomm_sparse_get(average, &nnz, &indices, &sums));
    CHECK(nnz == 1 && indices[0] == 1);
    CHECK(((const float *)sums)[0] == mean && ((const float *)sums)[1] == 2.0f);
    rcomm_sparse_free(average);
    OK(rcomm_reducer_sparse_average(reducer, 1, &average));
    CHECK(!average);
    rcomm_reducer_free(reducer);

    /* Each rank has one step more than the rank before it; gradients travel as f16. */
    const char *uneven = "{\"uneven\":\"divide_by_active\",\"wire\":\"f16\",\"first_bytes\":4}";
    OK(rcomm_reducer_new_with(dp, names, lens, 2, RCOMM_F32, uneven, &reducer));
    for (uint32_t step = 0; step <= rank; step++) {
        give_gradient(reducer, 1, (float)(rank + 1));
        give_gradient(reducer, 0, 1.0f);
        OK(rcomm_reducer_finish(reducer));
        /* The ranks from `step` on have input. */
        check_average(reducer, 1, (float)(step + 1 + size) / 2.0f, 0.01f);
    }
    uint64_t shadowed = 9;
    uint32_t last = 9;
    OK(rcomm_reducer_join(reducer, &shadowed, &last));
    CHECK(shadowed == size - 1 - rank && last == size - 1);
    rcomm_reducer_free(reducer);

    /* Hook 3 leaves each rank with its own gradients. The last has a static graph and no hook. None has the option that
       a join needs. */
    const char *hooks[] = {"{\"hook\":\"int8\"}", "{\"hook\":{\"power_sgd\":{\"rank\":1}},\"shapes\":[[32,31],[32]]}",
                           "{\"hook\":{\"batched_power_sgd\":{\"rank\":1,\"start\":0}}}",
                           "{\"hook\":{\"post_local_sgd\":{\"ranks\":1}}}",
                           "{\"delayed\":[1],\"delayed_until\":0,\"static_graph\":true,\"rebuild_buckets\":false,\"unused\":\"refuse\"}"};
    uint64_t matrix[] = {992, 32};
    for (size_t at = 0; at < sizeof hooks / sizeof hooks[0]; at++) {
        OK(rcomm_reducer_new_with(dp, names, matrix, 2, RCOMM_F32, hooks[at], &reducer));
        give_gradient(reducer, 1, (float)(rank + 1));
        give_gradient(reducer, 0, (float)(rank + 1));
        OK(rcomm_reducer_finish(reducer));
        check_average(reducer, 0, at == 3 ? (float)(rank + 1) : mean, 0.05f * mean);
        if (at == 4) CODE(RCOMM_INVALID_ARGUMENT, rcomm_reducer_join(reducer, NULL, NULL));
        rcomm_reducer_free(reducer);
    }
    rcomm_group_free(dp);
}

/* Groups of the ranks that are left. Here no rank is lost: the last rank is left out although it runs. */
static void shrinks(rcomm_world *world) {
    char *absent = NULL;
    uint32_t all[MAX];
    rcomm_group *wide = NULL;
    for (uint32_t r = 0; r < size; r++) all[r] = r;
    OK(rcomm_new_group(world, all, size, "wide", &wide));
    OK(rcomm_find_absent(wide, 30000, &absent));
    CHECK(strcmp(absent, "[]") == 0);
    rcomm_text_free(absent);
    uint32_t last = size - 1, left_size = 0;
    if (rank != last) {
        rcomm_group *left = NULL;
        OK(rcomm_group_shrink(wide, &last, 1, &left));
        OK(rcomm_group_place(left, NULL, &left_size));
        CHECK(left_size == size - 1);
        OK(rcomm_barrier(left, NULL));
        rcomm_group_free(left);
    } else {
        rcomm_group *left = NULL;
        CODE(RCOMM_INVALID_ARGUMENT, rcomm_group_shrink(wide, &last, 1, &left));
        CHECK(strstr(rcomm_last_error(), "excludes itself"));
    }
    rcomm_group_free(wide);
    OK(rcomm_barrier(group, NULL));
    OK(rcomm_shrink(world, NULL, 0));
    rcomm_group_free(group);
    OK(rcomm_world_group(world, &group));
    OK(rcomm_barrier(group, NULL));
}

#include "control.h"
#include "ended.h"
#include "values.h"
/* Uses the functions of values.h. */
#include "stores.h"
#include "symmetric.h"

int main(void) {
    rcomm_world *world = NULL;
    CODE(RCOMM_RENDEZVOUS, rcomm_init_at(3, 2, "127.0.0.1", 1, 0, &world));
    OK(rcomm_init(&world));
    OK(rcomm_world_place(world, &rank, &size));
    OK(rcomm_world_group(world, &group));
    CHECK(size <= MAX);
    reductions();
    gathers();
    exchanges();
    messages();
    windows();
    sparse();
    objects();
    ended_works();
    symmetric();
    refusals();
    options();
    in_place();
    coalesced();
    tests_while_another_waits();
    hooks();
    records(world);
    control(world);
    values(world);
    groups(world);
    more_groups(world);
    reducers(world);
    reducer_options(world);
    if (size == 1) stores(world);
    if (size > 1) shrinks(world);
    OK(rcomm_barrier(group, NULL));
    abort_work(world);
    OK(rcomm_barrier(group, NULL));
    rcomm_group_free(group);
    if (size == 1) {
        OK(rcomm_abort_groups(world, "the end"));
        rcomm_world_free(world);
        CHECK(atomic_load(&released_contexts) == 3);
        return 0;
    }
    OK(rcomm_grow(world, NULL, 0, size));
    CHECK(atomic_load(&released_contexts) == 3);
    OK(rcomm_world_group(world, &group));
    OK(rcomm_barrier(group, NULL));
    rcomm_group_free(group);
    OK(rcomm_shutdown(world));
    return 0;
}
