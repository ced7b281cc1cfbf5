/* For ranks.c: what a running job is asked and told. The function of a handler is called in survivor.c. */
static _Atomic int released_contexts;

static int32_t answer(void *context, const char *const *names, const char *const *values, size_t count,
                      const rcomm_value *out) {
    (void)context, (void)names, (void)values, (void)count;
    return rcomm_value_set(out, NULL, 0);
}

static void release_context(void *context) {
    (void)context;
    atomic_fetch_add(&released_contexts, 1);
}

static void control(rcomm_world *world) {
    OK(rcomm_handle(world, "rate", answer, release_context, NULL));
    CHECK(atomic_load(&released_contexts) == 0);
    /* After an error the context is released. */
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_handle(world, "timeouts", answer, release_context, NULL));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_handle(world, "none", NULL, release_context, NULL));
    CHECK(atomic_load(&released_contexts) == 2);

    rcomm_wait *wait = NULL;
    char *waits = NULL;
    OK(rcomm_wait_begin(world, "loader", &wait));
    OK(rcomm_waits(world, &waits));
    CHECK(strstr(waits, "\"loader\""));
    rcomm_text_free(waits);
    rcomm_wait_end(wait);
    rcomm_wait_end(NULL);
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_wait_begin(world, "rcomm.own", &wait));

    int32_t level = 9;
    OK(rcomm_debug_level(world, &level));
    CHECK(level == 0);
    OK(rcomm_set_debug_level(world, 1));
    OK(rcomm_debug_level(world, &level));
    CHECK(level == 1);
    rcomm_group *checked = NULL;
    uint32_t all[MAX];
    for (uint32_t r = 0; r < size; r++) all[r] = r;
    OK(rcomm_new_group(world, all, size, "checked", &checked));
    OK(rcomm_barrier(checked, NULL));
    rcomm_group_free(checked);
    OK(rcomm_set_debug_level(world, 0));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_set_debug_level(world, 2));
}
