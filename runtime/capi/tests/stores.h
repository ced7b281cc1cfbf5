/* For ranks.c: worlds that meet at a store of the caller, a table that the threads of this process share. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    size_t keys;
    struct { char key[256]; uint8_t value[4096]; size_t length; bool there; } table[512];
    atomic_int released;
} map = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* The row of a key; a key that is missing gets one, without a value. The caller holds the lock. */
static size_t find(const char *key) {
    size_t i = 0;
    while (i < map.keys && strcmp(map.table[i].key, key) != 0) i++;
    CHECK(i < 512 && strlen(key) < 256);
    if (i == map.keys) {
        strcpy(map.table[i].key, key);
        map.table[i].there = false;
        map.keys++;
    }
    return i;
}

static void put_value(size_t at, const void *value, size_t length) {
    CHECK(length <= sizeof map.table[at].value);
    if (length) memcpy(map.table[at].value, value, length);
    map.table[at].length = length;
    map.table[at].there = true;
    pthread_cond_broadcast(&map.changed);
}

static int32_t map_set(void *context, const char *key, const uint8_t *value, size_t length) {
    CHECK(context == &map);
    pthread_mutex_lock(&map.lock);
    put_value(find(key), value, length);
    pthread_mutex_unlock(&map.lock);
    return 0;
}

static int32_t map_get(void *context, const char *key, uint64_t timeout_ms, const rcomm_value *value) {
    CHECK(context == &map);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ms / 1000) + (timeout_ms % 1000 ? 1 : 0);
    pthread_mutex_lock(&map.lock);
    size_t at = find(key);
    int waited = timeout_ms == 0;
    while (!map.table[at].there && !waited) waited = pthread_cond_timedwait(&map.changed, &map.lock, &until);
    int32_t code = map.table[at].there ? rcomm_value_set(value, map.table[at].value, map.table[at].length) : 0;
    pthread_mutex_unlock(&map.lock);
    return code;
}

static int32_t map_add(void *context, const char *key, int64_t delta, int64_t *sum) {
    CHECK(context == &map);
    pthread_mutex_lock(&map.lock);
    size_t at = find(key);
    char text[32] = {0};
    if (map.table[at].there) memcpy(text, map.table[at].value, map.table[at].length);
    *sum = strtoll(text, NULL, 10) + delta;
    snprintf(text, sizeof text, "%lld", (long long)*sum);
    put_value(at, text, strlen(text));
    pthread_mutex_unlock(&map.lock);
    return 0;
}

static int32_t map_compare_set(void *context, const char *key, const uint8_t *expected, size_t expected_length,
                               const uint8_t *desired, size_t desired_length, const rcomm_value *value) {
    CHECK(context == &map);
    pthread_mutex_lock(&map.lock);
    size_t at = find(key);
    bool there = map.table[at].there;
    bool same = there && map.table[at].length == expected_length &&
                memcmp(map.table[at].value, expected, expected_length) == 0;
    if (same || (!there && expected_length == 0)) put_value(at, desired, desired_length);
    int32_t code = map.table[at].there ? rcomm_value_set(value, map.table[at].value, map.table[at].length) : 0;
    pthread_mutex_unlock(&map.lock);
    return code;
}

static int32_t map_remove(void *context, const char *key, int32_t *was_there) {
    CHECK(context == &map);
    pthread_mutex_lock(&map.lock);
    size_t at = find(key);
    *was_there = map.table[at].there;
    map.table[at].there = false;
    pthread_mutex_unlock(&map.lock);
    return 0;
}

static void map_release(void *context) {
    CHECK(context == &map);
    atomic_fetch_add(&map.released, 1);
}

/* Merges this job of one rank with nothing else: at the table, then at this job's own store. */
static void merged_with_no_other(rcomm_world *world) {
    rcomm_config *config = NULL;
    rcomm_world *merged = NULL;
    rcomm_group *all = NULL;
    rcomm_store_calls calls = {&map, map_set, map_get, map_add, map_compare_set, map_remove, map_release};
    for (int at_the_table = 1; at_the_table >= 0; at_the_table--) {
        OK(rcomm_config_new(&config));
        OK(rcomm_config_set(config, "RCOMM_TIMEOUT_MS", "32000"));
        if (at_the_table) OK(rcomm_config_set_store(config, calls));
        /* This job's own store asks for a proof of the secret. */
        else OK(rcomm_config_set(config, "RCOMM_STORE", "secret"));
        CODE(RCOMM_INVALID_ARGUMENT, rcomm_merge_remote(world, group, 1, "", config, &merged));
        CHECK(strstr(rcomm_last_error(), "needs a purpose"));
        OK(rcomm_merge_remote(world, group, 1, "merged job", config, &merged));
        OK(rcomm_world_group(merged, &all));
        uint32_t in_all = 9, all_size = 9;
        uint64_t timeout_ms = 0;
        OK(rcomm_group_place(all, &in_all, &all_size));
        OK(rcomm_group_timeout(all, &timeout_ms));
        CHECK(in_all == 0 && all_size == 1 && timeout_ms == 32000);
        rcomm_group_free(all);
        OK(rcomm_shutdown(merged));
        rcomm_config_free(config);
    }
}

/* One of two ranks of a job of its own, as a thread; their store is the table. */
static void *rank_of_two(void *number) {
    const char *own = number;
    rcomm_config *config = NULL;
    rcomm_world *world = NULL;
    rcomm_group *all = NULL;
    rcomm_store_calls calls = {&map, map_set, map_get, map_add, map_compare_set, map_remove, map_release};
    OK(rcomm_config_new(&config));
    OK(rcomm_config_set(config, "RANK", own));
    OK(rcomm_config_set(config, "WORLD_SIZE", "2"));
    OK(rcomm_config_set(config, "MASTER_ADDR", "127.0.0.1"));
    OK(rcomm_config_set(config, "TORCHELASTIC_RUN_ID", "two-threads"));
    OK(rcomm_config_set(config, "RCOMM_RING_DIR", "memory"));
    OK(rcomm_config_set(config, "RCOMM_TIMEOUT_MS", "31000"));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_config_set(config, "RCOMM_TRANSPORT", "pigeon"));
    CHECK(strstr(rcomm_last_error(), "auto, shm or tcp"));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_config_set(config, "RCOMM_TIMEOUT", "31"));
    CHECK(strstr(rcomm_last_error(), "no option of the runtime is named RCOMM_TIMEOUT"));
    OK(rcomm_config_set_store(config, calls));
    OK(rcomm_init_with(config, &world));
    rcomm_config_free(config);
    OK(rcomm_world_group(world, &all));
    uint64_t timeout_ms = 0;
    OK(rcomm_group_timeout(all, &timeout_ms));
    CHECK(timeout_ms == 31000);
    int32_t sum = own[0] - '0' + 1;
    OK(rcomm_all_reduce(all, &sum, 1, RCOMM_I32, SUM, NULL));
    CHECK(sum == 3);
    rcomm_group_free(all);
    OK(rcomm_shutdown_within(world, 30000));
    return NULL;
}

static void stores(rcomm_world *world) {
    rcomm_config *config = NULL;
    rcomm_store_calls none = {&map, NULL, NULL, NULL, NULL, NULL, map_release};
    OK(rcomm_config_new(&config));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_config_set_store(config, none));
    CHECK(strstr(rcomm_last_error(), "function set is NULL") && atomic_load(&map.released) == 1);
    rcomm_config_free(config);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, rank_of_two, "1") == 0);
    rank_of_two("0");
    CHECK(pthread_join(other, NULL) == 0);
    await_count(&map.released, 3);
    merged_with_no_other(world);
    await_count(&map.released, 4);
    rcomm_store_calls calls = {&map, map_set, map_get, map_add, map_compare_set, map_remove, map_release};
    values_without_a_world(calls);
    await_count(&map.released, 5);
}
