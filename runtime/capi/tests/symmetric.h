/* For ranks.c: memory that all ranks use in place. */
static void symmetric(void) {
    uint32_t next = (rank + 1) % size, before = (rank + size - 1) % size;
    rcomm_symmetric *memory = NULL;
    OK(rcomm_symmetric_new(group, 100, &memory));
    void *mine = NULL, *theirs = NULL, *pad = NULL;
    size_t bytes = 0, pad_bytes = 0;
    OK(rcomm_symmetric_buffer(memory, rank, &mine, &bytes));
    CHECK(bytes == 100);
    OK(rcomm_symmetric_buffer(memory, next, &theirs, &bytes));
    OK(rcomm_symmetric_signal_pad(memory, rank, &pad, &pad_bytes));
    CHECK(pad_bytes >= 64 * 4 * size);
    OK(rcomm_symmetric_fill(memory, 1, 70 + rank, 2));
    OK(rcomm_symmetric_barrier(memory, 63));
    CHECK(atomic_load((_Atomic uint32_t *)theirs + 2) == 70 + next);
    if (size > 1) {
        atomic_store((_Atomic uint32_t *)theirs, rank + 1);
        OK(rcomm_symmetric_put_signal(memory, next, 3));
        OK(rcomm_symmetric_wait_signal(memory, before, 3));
        CHECK(atomic_load((_Atomic uint32_t *)mine) == before + 1);
        CHECK(atomic_load((_Atomic uint32_t *)pad + 3 * size + before) == 0);
    }
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_symmetric_put_signal(memory, next, 64));
    CHECK(strstr(rcomm_last_error(), "there is no channel 64"));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_symmetric_fill(memory, 24, 0, 2));
    OK(rcomm_symmetric_close(memory));
    rcomm_symmetric_free(NULL);
}
