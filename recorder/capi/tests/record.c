/* Records as rank 1, and as rank 2 in a forked child, and closes a ring of rank 3; the files of all rings remain. */
#define _POSIX_C_SOURCE 200809L
#include "rcomm_recorder.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, rcomm_recorder_last_error()); \
            exit(1); \
        } \
    } while (0)

static rcomm_recorder *open_ring(const char *folder, uint32_t rank) {
    rcomm_recorder_config config = {
        .directory = folder, .job = "fromC", .rank = rank, .world_size = 4, .attempt = 2, .entries = 64};
    rcomm_recorder *ring = NULL;
    CHECK(rcomm_recorder_open(&config, &ring) == RCOMM_RECORDER_OK);
    return ring;
}

static rcomm_recorder_operation operation(uint32_t group, uint8_t op) {
    rcomm_recorder_operation result;
    memset(&result, 0, sizeof result);
    result.group = group;
    result.op = op;
    result.reduction = 255;
    result.call_site = result.peer = result.root = RCOMM_RECORDER_NONE;
    return result;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    const char *folder = arguments[1];

    rcomm_recorder *none = NULL;
    rcomm_recorder_config wrong = {.directory = folder, .job = "fromC", .rank = 4, .world_size = 4};
    CHECK(rcomm_recorder_open(&wrong, &none) == RCOMM_RECORDER_FAILED && none == NULL);
    CHECK(strstr(rcomm_recorder_last_error(), "rank 4 is not less than the world size 4") != NULL);
    CHECK(rcomm_recorder_open(NULL, &none) == RCOMM_RECORDER_FAILED);
    /* Functions that record accept NULL as the handle. */
    rcomm_recorder_operation nothing = operation(0, RCOMM_RECORDER_BARRIER);
    rcomm_recorder_completed(NULL, rcomm_recorder_begin(NULL, &nothing));
    rcomm_recorder_phase(NULL, "nowhere");
    CHECK(rcomm_recorder_close(NULL) == RCOMM_RECORDER_OK);

    rcomm_recorder *ring = open_ring(folder, 1);
    char path[512];
    size_t needed = rcomm_recorder_path(ring, path, sizeof path);
    CHECK(needed == strlen(path) + 1 && strstr(path, "fromC/1.2.ring") != NULL);
    char cut[4];
    CHECK(rcomm_recorder_path(ring, cut, sizeof cut) == needed && strlen(cut) == 3);

    const uint32_t all[] = {0, 1, 2, 3}, two[] = {3, 1};
    rcomm_recorder_group_info info = {.name = "0", .description = "default_pg", .ranks = all, .size = 4, .timeout_ms = 600000};
    uint32_t world = rcomm_recorder_group(ring, &info);
    rcomm_recorder_group_info later = {.id = 1, .name = "tp", .description = "tensor parallel"};
    uint32_t tensor = rcomm_recorder_group(ring, &later);
    CHECK(rcomm_recorder_group_members(ring, tensor, two, 2) == RCOMM_RECORDER_OK);
    CHECK(rcomm_recorder_group_members(ring, tensor, two, 2) == RCOMM_RECORDER_FAILED);
    rcomm_recorder_group_info by_place = {.id = 2, .name = "0xf00d", .size = 8, .own_rank = 4};
    CHECK(rcomm_recorder_group(ring, &by_place) == 2);

    const uint64_t shape[] = {4, 8};
    rcomm_recorder_tensor matrix = {.dtype = 3, .dimensions = 2, .shape = shape};
    uint32_t site = rcomm_recorder_call_site(ring, "train.py", "step", 17);
    CHECK(site == rcomm_recorder_call_site(ring, "train.py", "step", 17));

    rcomm_recorder_operation reduce = operation(world, RCOMM_RECORDER_ALL_REDUCE);
    reduce.signature = rcomm_recorder_signature(ring, "gloo", "all_reduce", &matrix, 1, &matrix, 1);
    reduce.collective_seq_id = reduce.op_id = 1;
    reduce.reduction = 0;
    reduce.call_site = site;
    rcomm_recorder_ticket ticket = rcomm_recorder_begin(ring, &reduce);
    rcomm_recorder_started(ring, ticket);
    rcomm_recorder_completed_after(ring, ticket, 2500000);
    rcomm_recorder_retired(ring, ticket);

    rcomm_recorder_operation send = operation(tensor, RCOMM_RECORDER_SEND);
    send.signature = rcomm_recorder_signature(ring, "gloo", "send", &matrix, 1, NULL, 0);
    send.is_p2p = send.starts_at_once = 1;
    send.p2p_seq_id = send.op_id = 1;
    send.peer = 0;
    rcomm_recorder_begin(ring, &send);

    const uint64_t splits[] = {1, 2, 3, 4};
    rcomm_recorder_operation exchange = operation(world, RCOMM_RECORDER_ALL_TO_ALL_V_SINGLE);
    exchange.signature = rcomm_recorder_signature(ring, "gloo", "all_to_all_single", &matrix, 1, &matrix, 1);
    exchange.collective_seq_id = exchange.op_id = 2;
    exchange.input_splits = splits;
    exchange.input_split_count = 4;
    rcomm_recorder_failed(ring, rcomm_recorder_begin(ring, &exchange));

    rcomm_recorder_phase(ring, "load data");
    rcomm_recorder_step(ring, 9);
    rcomm_recorder_heartbeat(ring);

    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* The parent's handle does nothing here. */
        rcomm_recorder_completed(ring, rcomm_recorder_begin(ring, &reduce));
        rcomm_recorder_step(ring, 1000);
        CHECK(rcomm_recorder_call_site(ring, "child.py", "", 1) == RCOMM_RECORDER_NONE);
        CHECK(rcomm_recorder_path(ring, NULL, 0) == 0);
        rcomm_recorder *own = open_ring(folder, 2);
        rcomm_recorder_begin(own, &nothing);
        rcomm_recorder_begin(ring, &reduce);
        CHECK(rcomm_recorder_close(ring) == RCOMM_RECORDER_OK);
        rcomm_recorder_leave(own);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    rcomm_recorder *closed = open_ring(folder, 3);
    rcomm_recorder_path(closed, path, sizeof path);
    CHECK(access(path, F_OK) == 0);
    CHECK(rcomm_recorder_close(closed) == RCOMM_RECORDER_OK);
    /* Other ranks have not ended well, so the record of this one stays. */
    CHECK(access(path, F_OK) == 0);
    rcomm_recorder_leave(ring);
    rcomm_recorder_leave(NULL);
    return 0;
}
