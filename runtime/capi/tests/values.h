/* For ranks.c: small values over the store, without a group. */
static void check_value(const rcomm_values *values, size_t number, const char *expected) {
    const uint8_t *bytes = NULL;
    size_t length = 0;
    OK(rcomm_values_get(values, number, &bytes, &length));
    CHECK(length == strlen(expected) && memcmp(bytes, expected, length) == 0);
}

/* Writes the value of the rank `of`: "rank 0", "rank 1" and so on; that of the last rank is empty. */
static void own_value(uint32_t of, char text[16]) {
    snprintf(text, 16, "rank %u", of);
    if (of == size - 1) text[0] = 0;
}

static void exchange_values(const rcomm_store_collectives *store) {
    enum { LIMIT = 60000 };
    rcomm_values *values = NULL;
    size_t count = 9;
    int64_t sum = 0;
    char own[16], text[16];
    own_value(rank, own);
    OK(rcomm_store_barrier(store, LIMIT));
    OK(rcomm_store_all_sum(store, -(int64_t)rank - 1, LIMIT, &sum));
    CHECK(sum == -(int64_t)(size * (size + 1) / 2));

    OK(rcomm_store_all_gather(store, (const uint8_t *)own, strlen(own), LIMIT, &values));
    OK(rcomm_values_count(values, &count));
    CHECK(count == size);
    for (uint32_t r = 0; r < size; r++) {
        own_value(r, text);
        check_value(values, r, text);
    }
    const uint8_t *none = NULL;
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_values_get(values, size, &none, &count));
    CHECK(strstr(rcomm_last_error(), "there is no value"));
    rcomm_values_free(values);

    /* What the other ranks pass is ignored. */
    uint32_t root = size - 1;
    const char *word = rank == root ? "from the root" : "ignored";
    OK(rcomm_store_broadcast(store, (const uint8_t *)word, strlen(word), root, LIMIT, &values));
    check_value(values, 0, "from the root");
    rcomm_values_free(values);

    OK(rcomm_store_gather(store, (const uint8_t *)own, strlen(own), root, LIMIT, &values));
    CHECK((values != NULL) == (rank == root));
    if (values) {
        own_value(0, text);
        check_value(values, 0, text);
    }
    rcomm_values_free(values);

    const uint8_t *list[MAX];
    size_t lengths[MAX];
    static const char letters[] = "abcdefgh";
    for (uint32_t r = 0; r < size; r++) {
        list[r] = (const uint8_t *)&letters[r];
        lengths[r] = 1;
    }
    OK(rcomm_store_scatter(store, rank == 0 ? list : NULL, lengths, size, 0, LIMIT, &values));
    text[0] = letters[rank];
    text[1] = 0;
    check_value(values, 0, text);
    rcomm_values_free(values);

    /* Refused before anything is exchanged: the ranks stay in step. */
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_store_all_sum(store, 1, LIMIT, NULL));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_store_broadcast(store, NULL, 0, size, LIMIT, &values));
    CHECK(strstr(rcomm_last_error(), "is not one of"));
    if (rank == 0) CODE(RCOMM_INVALID_ARGUMENT, rcomm_store_scatter(store, NULL, lengths, size, 0, LIMIT, &values));
    if (rank == 0) CODE(RCOMM_INVALID_ARGUMENT, rcomm_store_scatter(store, list, lengths, size - 1, 0, LIMIT, &values));
    OK(rcomm_store_barrier(store, LIMIT));
}

static void values(rcomm_world *world) {
    rcomm_store_collectives *store = NULL, *late = NULL;
    OK(rcomm_store_collectives_new(world, "values", &store));
    exchange_values(store);
    rcomm_store_collectives_free(store);
    rcomm_store_collectives_free(NULL);
    rcomm_values_free(NULL);
    /* Rank 0 calls alone: the error names the others. */
    OK(rcomm_store_collectives_new(world, "late", &late));
    if (rank == 0 && size == 3) {
        CODE(RCOMM_TIMEOUT, rcomm_store_barrier(late, 50));
        CHECK(strstr(rcomm_last_error(), "ranks 1, 2 did not arrive"));
    }
    rcomm_store_collectives_free(late);
}

/* Over a store of the caller, without a world: here of one rank. */
static void values_without_a_world(rcomm_store_calls calls) {
    rcomm_config *config = NULL;
    rcomm_store_collectives *store = NULL;
    OK(rcomm_config_new(&config));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_store_collectives_with(config, "alone", 0, 1, &store));
    CHECK(strstr(rcomm_last_error(), "no store of the caller"));
    OK(rcomm_config_set_store(config, calls));
    CODE(RCOMM_INVALID_ARGUMENT, rcomm_store_collectives_with(config, "alone", 1, 1, &store));
    OK(rcomm_store_collectives_with(config, "alone", 0, 1, &store));
    rcomm_config_free(config);
    exchange_values(store);
    rcomm_store_collectives_free(store);
}
