/* For ranks.c: works whose operation has ended before any wait or test was called. */

/* Calls until it succeeds, for 30 s at most. Until the operation has ended the call must be refused. */
#define ONCE_ENDED(call) do { \
        int32_t code; \
        int tries = 30000; \
        while ((code = (call)) == RCOMM_INVALID_ARGUMENT && tries-- > 0) { \
            CHECK(strstr(rcomm_last_error(), "has not ended")); \
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); \
        } \
        if (code != RCOMM_OK) fail(__LINE__, #call); \
    } while (0)

static void ended_works(void) {
    char *text = NULL;
    rcomm_work *work = NULL;
    OK(rcomm_broadcast_object(group, rank == 0 ? "7" : NULL, 0, NULL, &work));
    ONCE_ENDED(rcomm_work_text(work, &text));
    is_text(text, "7");
    rcomm_work_free(work);

    rcomm_window *window = NULL;
    OK(rcomm_window_allocate(group, 1, RCOMM_U32, NULL, &work));
    ONCE_ENDED(rcomm_work_window(work, &window));
    rcomm_work_free(work);
    OK(rcomm_window_close(window));

    uint64_t shape[] = {5};
    int64_t index = 1;
    float value = 2;
    rcomm_sparse *sum = NULL;
    OK(rcomm_all_reduce_sparse(group, shape, 1, 1, &index, &value, 1, RCOMM_F32, NULL, &work));
    ONCE_ENDED(rcomm_work_sparse(work, &sum));
    rcomm_work_free(work);
    rcomm_sparse_free(sum);

    if (size == 1) return;
    uint32_t mine = rank, theirs = 99, source = 99, before = (rank + size - 1) % size;
    rcomm_work *sent = NULL;
    OK(rcomm_recv_any(group, &theirs, 1, RCOMM_U32, 11, NULL, &work));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_work_text(work, &text));
    OK(rcomm_send(group, &mine, 1, RCOMM_U32, (rank + 1) % size, 11, &sent));
    ONCE_ENDED(rcomm_work_source(work, &source));
    CHECK(source == before && theirs == before);
    finish(work);
    finish(sent);
}
