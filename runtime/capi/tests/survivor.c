/* A rank in C, where SIGPIPE ends the process unless the library prevents it. `survivor SCENARIO`:
 * "endpoint": works until the file that RCOMM_TEST_STOP names exists; its handler "rate" answers with the number of its
 *     parameters and the first of them, and fails if it has none.
 * "peer": rank 1 dies after the first message, rank 0 sends messages until that fails, and exits with 3. */
#define _POSIX_C_SOURCE 200809L
#include "rcomm.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void ok(int32_t code) {
    if (code != RCOMM_OK) {
        fprintf(stderr, "survivor: %s\n", rcomm_last_error());
        exit(1);
    }
}

static void pause_ms(long ms) {
    struct timespec time = {0, ms * 1000000};
    nanosleep(&time, NULL);
}

static int32_t answer(void *context, const char *const *names, const char *const *values, size_t count,
                      const rcomm_value *out) {
    char text[64];
    (void)context;
    int length = snprintf(text, sizeof text, "%zu %s=%s\n", count, count ? names[0] : "", count ? values[0] : "");
    ok(rcomm_value_set(out, (const uint8_t *)text, (size_t)length));
    return count == 0;
}

int main(int argc, char **argv) {
    const char *scenario = argc > 1 ? argv[1] : "";
    rcomm_world *world;
    rcomm_group *group;
    uint32_t rank = 0;
    ok(rcomm_init(&world));
    ok(rcomm_world_group(world, &group));
    ok(rcomm_world_place(world, &rank, NULL));
    if (strcmp(scenario, "endpoint") == 0) {
        ok(rcomm_handle(world, "rate", answer, NULL, NULL));
        const char *stop = getenv("RCOMM_TEST_STOP");
        while (stop && access(stop, F_OK) != 0) {
            ok(rcomm_barrier(group, NULL));
            pause_ms(5);
        }
    } else if (rank == 1) {
        uint32_t got;
        ok(rcomm_recv(group, &got, 1, RCOMM_U32, 0, 0, NULL));
        kill(getpid(), SIGKILL);
    } else {
        uint32_t sent = 7;
        while (rcomm_send(group, &sent, 1, RCOMM_U32, 1, 0, NULL) == RCOMM_OK) {
        }
        return strstr(rcomm_last_error(), "rank 1") ? 3 : 4;
    }
    rcomm_group_free(group);
    ok(rcomm_shutdown(world));
    return 0;
}
