/*
 * rcomm: collective communication between ranks, with a flight recorder that is always on.
 *
 * Generated from runtime/capi/src; a test compares the two.
 *
 * Every function that returns int32_t returns RCOMM_OK or the code of an error; rcomm_last_error returns
 * the text of the calling thread's last error.
 *
 * Handles and memory. A handle lives until the call that frees or consumes it; until then several
 * threads may use it at once. A function that takes `rcomm_work **work` runs the operation and returns
 * when that has ended, if `work` is NULL. Otherwise it starts the operation and writes a handle to `*work`: until
 * rcomm_work_released reports that the memory is released, input buffers must stay valid and unchanged,
 * and output buffers must stay valid and must not be accessed. Counts are numbers of elements; buffers
 * are in host memory, or on a device if the handle of the group is from rcomm_group_on_stream.
 */

#ifndef RCOMM_H
#define RCOMM_H

#include <stddef.h>
#include <stdint.h>

// Element type: a 32-bit float.
#define RCOMM_F32 0

// Element type: a 64-bit float.
#define RCOMM_F64 1

// Element type: a 16-bit float.
#define RCOMM_F16 2

// Element type: bfloat16, the upper 16 bits of a 32-bit float.
#define RCOMM_BF16 3

// Element type: a signed 8-bit integer.
#define RCOMM_I8 4

// Element type: an unsigned 8-bit integer.
#define RCOMM_U8 5

// Element type: a signed 16-bit integer.
#define RCOMM_I16 6

// Element type: a signed 32-bit integer.
#define RCOMM_I32 7

// Element type: a signed 64-bit integer.
#define RCOMM_I64 8

// Element type: an unsigned 32-bit integer.
#define RCOMM_U32 9

// Element type: an unsigned 64-bit integer.
#define RCOMM_U64 10

// Element type: a boolean in one byte.
#define RCOMM_BOOL 11

// Element type: two 32-bit floats.
#define RCOMM_COMPLEX64 12

// Element type: two 64-bit floats.
#define RCOMM_COMPLEX128 13

// Element type: an 8-bit float with 4 bits of exponent and 3 of mantissa.
#define RCOMM_F8E4M3 14

// Element type: an 8-bit float with 5 bits of exponent and 2 of mantissa.
#define RCOMM_F8E5M2 15

// Element type: an unsigned 16-bit integer.
#define RCOMM_U16 16

// Reduction: the sum.
#define RCOMM_SUM 0

// Reduction: the sum divided by the number of ranks.
#define RCOMM_AVG 1

// Reduction: the product.
#define RCOMM_PRODUCT 2

// Reduction: the minimum.
#define RCOMM_MIN 3

// Reduction: the maximum.
#define RCOMM_MAX 4

// Reduction: bitwise and.
#define RCOMM_BAND 5

// Reduction: bitwise or.
#define RCOMM_BOR 6

// Reduction: bitwise exclusive or.
#define RCOMM_BXOR 7

// Reduction: the sum of all inputs, each of which is first multiplied by its rank's factor.
#define RCOMM_PREMUL_SUM 8

// Wait hint: the duration is unknown.
#define RCOMM_WAIT_UNKNOWN 0

// Wait hint: the other ranks are about to arrive, so the waiting thread should spin.
#define RCOMM_WAIT_SHORT 1

// Wait hint: the other ranks may take long, so the waiting thread should sleep at once.
#define RCOMM_WAIT_LONG 2

// The call succeeded.
#define RCOMM_OK 0

// A deadline passed.
#define RCOMM_TIMEOUT 1

// The group was aborted.
#define RCOMM_ABORTED 2

// The connection to a peer broke, or its process is gone; or another rank has ended the group because of a rank that
// the text names.
#define RCOMM_PEER_LOST 3

// The ranks disagree on the operation.
#define RCOMM_MISMATCH 4

// An argument is invalid; nothing was sent.
#define RCOMM_INVALID_ARGUMENT 5

// The operation, reduction or function is not supported; nothing was sent.
#define RCOMM_UNSUPPORTED 6

// The store is gone, refused a request, or sent a wrong reply.
#define RCOMM_STORE 7

// The ranks could not find each other, or do not agree on the world that they start.
#define RCOMM_RENDEZVOUS 8

// The operating system reported an error.
#define RCOMM_IO 9

// A peer did not prove that it knows the job's secret.
#define RCOMM_UNAUTHORIZED 10

// The backend's library reported an error.
#define RCOMM_BACKEND 11

// The world or group was used after it was shut down or destroyed.
#define RCOMM_CLOSED 12

// A rank's input contains a NaN while NaNs are rejected.
#define RCOMM_NOT_A_NUMBER 13

// An error in rcomm itself.
#define RCOMM_PANIC 255

// Options of a world, and the store through which its ranks find each other.
typedef struct rcomm_config rcomm_config;

// Elements in the memory of a device, used on one stream.
typedef struct rcomm_device_memory rcomm_device_memory;

// An ordered set of ranks that call operations together.
typedef struct rcomm_group rcomm_group;

// Segments of device memory that NCCL allocates, for an allocator that cuts them into tensors. Groups with which the
// pool is registered use the memory directly.
typedef struct rcomm_pool rcomm_pool;

// Averages the gradients of a model over the ranks of a group.
typedef struct rcomm_reducer rcomm_reducer;

// A sparse tensor returned by rcomm.
typedef struct rcomm_sparse rcomm_sparse;

// A stream of a CUDA device: its work runs in the order in which it was enqueued.
typedef struct rcomm_stream rcomm_stream;

// Memory of the same size on each rank of a host, which all of them use in place.
typedef struct rcomm_symmetric rcomm_symmetric;

// The place for the value that a function of a store has read, or for a handler's answer: see `rcomm_value_set`.
typedef struct rcomm_value rcomm_value;

// Collectives of small values over a store: for the control of a job, where no group is there yet, or none is usable.
// Calls of the same handle run one after the other.
typedef struct rcomm_store_collectives rcomm_store_collectives;

// Values that a collective over the store has returned, numbered from 0.
typedef struct rcomm_values rcomm_values;

// A wait of the program's, which is counted from its begin to its end.
typedef struct rcomm_wait rcomm_wait;

// Memory of all members of a group that each of them reads and writes one-sidedly.
typedef struct rcomm_window rcomm_window;

// An operation in progress.
typedef struct rcomm_work rcomm_work;

// This process's membership in a job.
typedef struct rcomm_world rcomm_world;

// How values are combined.
typedef struct rcomm_reduction {
  // `RCOMM_SUM` and so on.
  uint8_t op;
  // Factor of this rank's input; used for `RCOMM_PREMUL_SUM` only.
  double factor;
} rcomm_reduction;

// The device memory of a group's communicators on one rank, in bytes.
typedef struct rcomm_comm_memory {
  // All device memory that the library counts.
  uint64_t total;
  // What `rcomm_group_suspend` keeps.
  uint64_t persistent;
  // What `rcomm_group_suspend` releases, or has released.
  uint64_t releasable;
  // 1 if the releasable memory is released now, else 0.
  int32_t is_released;
} rcomm_comm_memory;

// The functions of a store of the caller, and the argument that each of them gets first. Keys are texts that end with
// a zero byte; values are any bytes. A function returns 0, or another number if the store failed.
typedef struct rcomm_store_calls {
  // Passed to each function.
  void *context;
  // Sets a key.
  int32_t (*set)(void *context, const char *key, const uint8_t *value, size_t length);
  // Waits until a key is there, for `timeout_ms` at most (0 = does not wait), and puts the key's value into `value`;
  // nothing, if the key is not there by then.
  int32_t (*get)(void *context,
                 const char *key,
                 uint64_t timeout_ms,
                 const struct rcomm_value *value);
  // Adds to a counter (0 if the key is not there) and writes the counter's new value. A counter is stored as a
  // decimal text.
  int32_t (*add)(void *context, const char *key, int64_t delta, int64_t *sum);
  // In one step: sets a key to `desired` if it holds `expected`, or if it is not there and `expected` is empty; puts
  // the value that the key then holds into `value`, or nothing if the key is not there.
  int32_t (*compare_set)(void *context,
                         const char *key,
                         const uint8_t *expected,
                         size_t expected_length,
                         const uint8_t *desired,
                         size_t desired_length,
                         const struct rcomm_value *value);
  // Removes a key; writes 1 to `*was_there` if the key was there, else 0.
  int32_t (*remove)(void *context, const char *key, int32_t *was_there);
  // Called once, when no function is called any more. May be NULL.
  void (*release)(void *context);
} rcomm_store_calls;

// One operation of a group, as the functions of a hook see it. The texts are valid until the function returns.
typedef struct rcomm_hooked_operation {
  // The name of the group.
  const char *group;
  // The name of the operation, such as `all_reduce`.
  const char *op;
  // The operation's sequence number: sends and receives are counted apart from collectives.
  uint64_t seq;
  // 1 for a send, a receive, and sends and receives that were issued as one; else 0.
  int32_t is_p2p;
  // The number of the operation's record in this rank's recorder.
  uint64_t record_id;
  // The operation's time-out, in milliseconds.
  uint64_t timeout_ms;
} rcomm_hooked_operation;

// One message of a batch.
typedef struct rcomm_message {
  // 1 to send, 0 to receive.
  int32_t is_send;
  // Address of the message's elements.
  void *buffer;
  // Number of elements.
  size_t count;
  // Code of the element type.
  uint8_t dtype;
  // The peer, as a rank of the group.
  uint32_t peer;
  // Tag: a send matches receives with the same tag.
  uint32_t tag;
} rcomm_message;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Every rank's `buffer` ends as the reduction of all ranks' buffers.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_reduce(const struct rcomm_group *group,
                         void *buffer,
                         size_t count,
                         uint8_t dtype,
                         struct rcomm_reduction reduction,
                         struct rcomm_work **work);

// The root's `buffer` ends as the reduction of all ranks' buffers.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_reduce(const struct rcomm_group *group,
                     void *buffer,
                     size_t count,
                     uint8_t dtype,
                     struct rcomm_reduction reduction,
                     uint32_t root,
                     struct rcomm_work **work);

// Every rank's `buffer` ends as a copy of the root's.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_broadcast(const struct rcomm_group *group,
                        void *buffer,
                        size_t count,
                        uint8_t dtype,
                        uint32_t root,
                        struct rcomm_work **work);

// A barrier: completes once all ranks have entered it.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_barrier(const struct rcomm_group *group, struct rcomm_work **work);

// `output` ends as the concatenation of all ranks' inputs, with `count` elements each.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_gather_single(const struct rcomm_group *group,
                                const void *input,
                                void *output,
                                size_t count,
                                uint8_t dtype,
                                struct rcomm_work **work);

// `output` ends as the reduction over all ranks of the part for this rank: `input` holds a part of `count` elements
// for each rank.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_reduce_scatter_single(const struct rcomm_group *group,
                                    const void *input,
                                    void *output,
                                    size_t count,
                                    uint8_t dtype,
                                    struct rcomm_reduction reduction,
                                    struct rcomm_work **work);

// Part r of `input`, with `count` elements, is sent to rank r; part r of `output` is received from rank r.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_to_all_single(const struct rcomm_group *group,
                                const void *input,
                                void *output,
                                size_t count,
                                uint8_t dtype,
                                struct rcomm_work **work);

// Like `rcomm_all_to_all_single`, but `input_splits[r]` elements are sent to rank r, and `output_splits[r]` are
// received from rank r.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_to_all_v_single(const struct rcomm_group *group,
                                  const void *input,
                                  const size_t *input_splits,
                                  void *output,
                                  const size_t *output_splits,
                                  uint8_t dtype,
                                  struct rcomm_work **work);

// Releases the device memory of the group's communicators that can be made again, for example while the program
// generates between two phases of training. Operations on devices are refused until `rcomm_group_resume`. All members
// call this. Waits for the other members and the operations under way, for the handle's time-out at most; after
// `RCOMM_TIMEOUT` the group is unusable. `RCOMM_UNSUPPORTED` if the group has no backend for devices, or its NCCL is
// too old; `RCOMM_INVALID_ARGUMENT` if the group is suspended.
//
// # Safety
// `group` is a valid handle.
int32_t rcomm_group_suspend(const struct rcomm_group *group);

// Undoes `rcomm_group_suspend`. All members call it; it waits and fails as `rcomm_group_suspend` does.
// `RCOMM_INVALID_ARGUMENT` if the group is not suspended.
//
// # Safety
// `group` is a valid handle.
int32_t rcomm_group_resume(const struct rcomm_group *group);

// Writes how much device memory the group's communicators have on this rank. `RCOMM_UNSUPPORTED` if the group has no
// backend for devices, or its NCCL does not report it.
//
// # Safety
// `group` is a valid handle; `memory` may be written.
int32_t rcomm_group_comm_memory(const struct rcomm_group *group,
                                struct rcomm_comm_memory *memory);

// Makes a pool without segments for this rank's device. `RCOMM_BACKEND` if there is no NCCL; `RCOMM_UNSUPPORTED` if it
// is too old to allocate or register memory.
//
// # Safety
// `world` is a valid handle; `pool` may be written.
int32_t rcomm_pool_new(const struct rcomm_world *world,
                       struct rcomm_pool **pool);

// Allocates a segment of `bytes` bytes, with undefined contents, registers it with the groups of the pool, and writes
// its address on the device. If a group does not register it, the segment is freed again. Waits until no launch of a
// group is in progress, at most 30 seconds for each registration.
//
// # Safety
// `pool` is a valid handle; `address` may be written.
int32_t rcomm_pool_allocate(const struct rcomm_pool *pool,
                            size_t bytes,
                            void **address);

// Deregisters the segment at this address from all groups of the pool and frees it. Waits for the groups' operations
// on it, at most 30 seconds for each group. `RCOMM_INVALID_ARGUMENT` if the pool has no such segment. After the error
// of a group that does not deregister it the segment stays.
//
// # Safety
// `pool` is a valid handle; the operations on the segment have released it, and it is not used afterwards.
int32_t rcomm_pool_deallocate(const struct rcomm_pool *pool,
                              void *address);

// Registers all present and future segments of the pool with the communicator of a group. If the group has no
// communicator yet, the segments are registered once it has one: at the next allocation, or when this is called again.
// After an error the group stays in the pool until `rcomm_pool_deregister`.
//
// # Safety
// `pool` and `group` are valid handles.
int32_t rcomm_pool_register(const struct rcomm_pool *pool,
                            const struct rcomm_group *group);

// Undoes `rcomm_pool_register`. Waits for the group's operations on the segments, at most 30 seconds for each.
// `RCOMM_INVALID_ARGUMENT` if the pool is not registered with the group. After any other error, the segments that are
// left are still registered.
//
// # Safety
// `pool` and `group` are valid handles.
int32_t rcomm_pool_deregister(const struct rcomm_pool *pool,
                              const struct rcomm_group *group);

// Writes the segments of the pool, sorted by address, as JSON: a list of `{"address": .., "bytes": ..}`. Free the text
// with `rcomm_text_free`.
//
// # Safety
// `pool` is a valid handle; `json` may be written.
int32_t rcomm_pool_segments(const struct rcomm_pool *pool,
                            char **json);

// Makes this the pool from which the functions that are written to `allocate` and `release` take and return segments
// of its device, until the process ends: they have the signatures of PyTorch's `CUDAPluggableAllocator`. Their stream
// is not used; where they fail, the reason is logged, and `allocate` returns NULL. `RCOMM_INVALID_ARGUMENT` if another
// pool is installed for the device.
//
// # Safety
// `pool` is a valid handle; `allocate` and `release` may be written.
int32_t rcomm_pool_install(const struct rcomm_pool *pool,
                           void *(**allocate)(ptrdiff_t size, int device, void *stream),
                           void (**release)(void *at, ptrdiff_t size, int device, void *stream));

// Frees the handle, and with it the pool unless it is installed. A segment of the pool is freed once no group has it
// registered any more. NULL has no effect.
//
// # Safety
// `pool` is NULL or a valid handle that is not used afterwards; its segments are not used afterwards unless the pool
// is installed.
void rcomm_pool_free(struct rcomm_pool *pool);

// Makes a configuration, to be freed with `rcomm_config_free`. Options that are not set in it come from the
// environment, which is read when a world is made with it.
//
// # Safety
// `config` may be written.
int32_t rcomm_config_new(struct rcomm_config **config);

// Sets an option by the name of its environment variable (`RCOMM_RING_DIR`, `RCOMM_TIMEOUT_MS`, `RANK`,
// `MASTER_ADDR` and so on), in place of that variable. An empty text counts as a variable that is not set. A value
// that the option cannot have, and a name that begins with `RCOMM_` and that no option has, are
// `RCOMM_INVALID_ARGUMENT`.
//
// With `TORCHELASTIC_USE_AGENT_STORE` = `True` all ranks are clients of a store that the launcher or another process
// serves at `MASTER_ADDR` and `MASTER_PORT`; otherwise rank 0 serves a store there.
//
// # Safety
// `config` is a valid handle; `name` and `value` are texts that end with a zero byte.
int32_t rcomm_config_set(const struct rcomm_config *config,
                         const char *name,
                         const char *value);

// Uses the store of the caller, which `calls` describes, in place of one at `MASTER_ADDR` and `MASTER_PORT`. The store
// must be the same on all ranks, and must answer until the world is shut down.
//
// # Safety
// `config` is a valid handle. The functions of `calls` may be called with its `context`, on any thread and on
// several at once, until `release` is called with `context`: once, when neither the configuration nor a world uses the
// store any more, or during this call if it fails.
int32_t rcomm_config_set_store(const struct rcomm_config *config,
                               struct rcomm_store_calls calls);

// Frees a configuration; worlds that were made with it stay. NULL has no effect.
//
// # Safety
// `config` is NULL or a valid handle that is not used afterwards.
void rcomm_config_free(struct rcomm_config *config);

// Joins the job that the configuration describes. Returns once all ranks have joined.
//
// # Safety
// `config` is a valid handle; `world` may be written.
int32_t rcomm_init_with(const struct rcomm_config *config, struct rcomm_world **world);

// Lets this rank's endpoint answer `POST /handlers/NAME?key=value` by a function of the program's: it gets the `count`
// pairs of the query as texts, in the order of their names, and puts a text into `answer` with `rcomm_value_set`. It
// returns 0, or another number if it failed: the text then says why. It is called on a thread of the endpoint, which
// waits for it at the end of the world: it must not wait for other ranks, which may be stuck. `release(context)` is
// called once, when the function is no longer called; `release` may be NULL.
//
// The name has 1 to 64 lower-case letters, digits, `-` and `_`, and `timeouts` is taken. `RCOMM_UNSUPPORTED` if this
// rank has no endpoint. After an error, `release` was called. A world that was made anew by `rcomm_grow` has no
// handlers of the program's.
//
// # Safety
// `world` is a valid handle; `name` is a text that ends with a zero byte; `handler` and `release` may be called with
// `context` on any thread, `handler` on several at once, until `release` was called or the world has ended.
int32_t rcomm_handle(const struct rcomm_world *world,
                     const char *name,
                     int32_t (*handler)(void *context,
                                        const char *const *names,
                                        const char *const *values,
                                        size_t count,
                                        const struct rcomm_value *answer),
                     void (*release)(void *context),
                     void *context);

// Counts a wait of the program's, for a data loader, say, or for a disk, from now until `rcomm_wait_end`:
// `rcomm_waits` and the rank's endpoint show it under this name. The name has 1 to 64 lower-case letters, digits, `-`,
// `_` and `.`, and does not begin with `rcomm.`; a world has 256 names at most. The wait may end on another thread.
//
// # Safety
// `world` is a valid handle; `name` is a text that ends with a zero byte; `wait` may be written.
int32_t rcomm_wait_begin(const struct rcomm_world *world,
                         const char *name,
                         struct rcomm_wait **wait);

// Ends the wait and frees the handle. NULL has no effect.
//
// # Safety
// `wait` is NULL or a valid handle that is not used afterwards.
void rcomm_wait_end(struct rcomm_wait *wait);

// Sets whether ranks compare what they issue (1) or not (0) in the groups that are made from now on. All members of a
// group must have set the same when they make it.
//
// # Safety
// `world` is a valid handle.
int32_t rcomm_set_debug_level(const struct rcomm_world *world,
                              int32_t level);

// Writes 1 if ranks compare what they issue in the groups that are made from now on, else 0.
//
// # Safety
// `world` is a valid handle; `level` may be written.
int32_t rcomm_debug_level(const struct rcomm_world *world, int32_t *level);

// Makes a stream on the device of this rank, the one on which groups with the backend `nccl` work. `high_priority` is
// 0 or 1. The driver is loaded at the first call: `RCOMM_BACKEND` if there is none.
//
// # Safety
// `world` is a valid handle; `stream` may be written.
int32_t rcomm_stream_new(const struct rcomm_world *world,
                         int32_t high_priority,
                         struct rcomm_stream **stream);

// Makes a handle of the default stream of this rank's device.
//
// # Safety
// `world` is a valid handle; `stream` may be written.
int32_t rcomm_stream_default(const struct rcomm_world *world, struct rcomm_stream **stream);

// Makes a handle of a stream of the program's (`CUstream`, `cudaStream_t`) on this rank's device.
// `RCOMM_INVALID_ARGUMENT` if the stream is of another device.
//
// # Safety
// `world` is a valid handle; `raw` is a live stream, which stays one until the handle and all that was made with it
// are freed and every operation on them has released its memory; `stream` may be written.
int32_t rcomm_stream_borrow(const struct rcomm_world *world,
                            void *raw,
                            struct rcomm_stream **stream);

// Writes the driver's handle of the stream (`CUstream`, `cudaStream_t`), for the program's own kernels and libraries.
// It is valid until `stream` and all that was made with it are freed.
//
// # Safety
// `stream` is a valid handle; `raw` may be written.
int32_t rcomm_stream_raw(const struct rcomm_stream *stream,
                         void **raw);

// Writes the number of the stream's device in this process, as the CUDA driver counts.
//
// # Safety
// `stream` is a valid handle; `ordinal` may be written.
int32_t rcomm_stream_device(const struct rcomm_stream *stream, uint32_t *ordinal);

// Waits without a deadline until all work that was enqueued on the stream is done. Do not call this while such work
// may wait for other ranks.
//
// # Safety
// `stream` is a valid handle.
int32_t rcomm_stream_synchronize(const struct rcomm_stream *stream);

// Frees the handle; memory and handles of groups that were made with it keep the stream. NULL has no effect.
//
// # Safety
// `stream` is NULL or a valid handle that is not used afterwards.
void rcomm_stream_free(struct rcomm_stream *stream);

// Allocates `count` elements, all zero, in the memory of the stream's device. They are used on this stream: work on
// other streams must have ended when the memory is freed.
//
// # Safety
// `stream` is a valid handle; `memory` may be written.
int32_t rcomm_device_new(const struct rcomm_stream *stream,
                         size_t count,
                         uint8_t dtype,
                         struct rcomm_device_memory **memory);

// Writes the address of the elements, which is one of the device's: for kernels, and for operations with a handle of
// `rcomm_group_on_stream`.
//
// # Safety
// `memory` is a valid handle; `address` may be written.
int32_t rcomm_device_address(const struct rcomm_device_memory *memory,
                             void **address);

// Copies `count` elements of the host to the device, after the work that is enqueued on the stream. `count` is the
// number of elements that `memory` has. Waits for the copy.
//
// # Safety
// `memory` is a valid handle; `count` elements lie at `elements`.
int32_t rcomm_device_fill(const struct rcomm_device_memory *memory,
                          const void *elements,
                          size_t count);

// Copies the elements to `count` elements of the host, after the work that is enqueued on the stream. `count` is the
// number of elements that `memory` has. Waits for the copy.
//
// # Safety
// `memory` is a valid handle; `count` elements may be written at `elements`.
int32_t rcomm_device_read(const struct rcomm_device_memory *memory,
                          void *elements,
                          size_t count);

// Frees handle and memory, after the work that is enqueued on the stream. No operation may use the memory then. NULL
// has no effect.
//
// # Safety
// `memory` is NULL or a valid handle that is not used afterwards, nor is the memory.
void rcomm_device_free(struct rcomm_device_memory *memory);

// Makes another handle of the same group, to be freed, whose buffers are addresses in the memory of the stream's
// device: of `rcomm_device_new` or of another allocator. Operations that are called with it begin after the work that
// is enqueued on the stream then. `rcomm_work_wait_stream` lets later work on a stream wait for them; a call without
// `work`, and `rcomm_work_wait`, wait on the host. Lists of counts and ranks stay in the host's memory. The group
// needs a backend for devices (in the environment, `RCOMM_BACKEND` = `cpu:cpu,cuda:nccl`), else operations fail with
// `RCOMM_UNSUPPORTED`.
//
// # Safety
// `group` and `stream` are valid handles; `handle` may be written.
int32_t rcomm_group_on_stream(const struct rcomm_group *group,
                              const struct rcomm_stream *stream,
                              struct rcomm_group **handle);

// Lets the work that is enqueued on the stream from now on wait for the end of the operation. The host does not wait.
// Returns the error of an operation that has failed; `RCOMM_UNSUPPORTED` if the operation does not run on a device.
//
// # Safety
// `work` and `stream` are valid handles.
int32_t rcomm_work_wait_stream(const struct rcomm_work *work,
                               const struct rcomm_stream *stream);

// Writes how many links of NVLink join each pair of devices of this host, directly or over switches, as JSON:
// `bus_ids`, and in `links` a row for each device. Asks NVIDIA's management library, for `timeout_ms` at most;
// `RCOMM_BACKEND` if there is none. Free the text with `rcomm_text_free`.
//
// # Safety
// `json` may be written.
int32_t rcomm_dma_connectivity(uint64_t timeout_ms,
                               char **json);

// Writes this process's rank in the group, and the number of the group's ranks. Either pointer may be NULL.
//
// # Safety
// `group` is a valid handle; `rank` and `size` are NULL or may be written.
int32_t rcomm_group_place(const struct rcomm_group *group,
                          uint32_t *rank,
                          uint32_t *size);

// Splits the group: members with the same color (0 to 4294967295) form a new group, ordered by key. A member with a
// negative color gets NULL. A color above 4294967295 is refused with `RCOMM_INVALID_ARGUMENT` before anything is sent.
//
// # Safety
// `group` is a valid handle, `purpose` a text that ends with a zero byte; `part` may be written.
int32_t rcomm_split(const struct rcomm_group *group,
                    int64_t color,
                    int64_t key,
                    const char *purpose,
                    struct rcomm_group **part);

// Sets the time-out of the group's operations on this rank from now on, in milliseconds.
//
// # Safety
// `group` is a valid handle.
int32_t rcomm_group_set_timeout(const struct rcomm_group *group, uint64_t timeout_ms);

// Writes the time-out of the group's operations, in milliseconds.
//
// # Safety
// `group` is a valid handle; `timeout_ms` may be written.
int32_t rcomm_group_timeout(const struct rcomm_group *group, uint64_t *timeout_ms);

// Extends the time-out of the group's operations on this rank by `extra_ms`, until the first collective issued from
// now on has ended.
//
// # Safety
// `group` is a valid handle.
int32_t rcomm_group_extend_timeout(const struct rcomm_group *group,
                                   uint64_t extra_ms);

// Makes another handle of the same group, to be freed, with options for the operations called with it: `timeout_ms` is
// their time-out (0 = that of `group`), and `wait` (`RCOMM_WAIT_UNKNOWN` and so on) hints how long the other ranks may
// take, which only affects how long a waiting thread spins.
//
// # Safety
// `group` is a valid handle; `handle` may be written.
int32_t rcomm_group_on_terms(const struct rcomm_group *group,
                             uint64_t timeout_ms,
                             uint8_t wait,
                             struct rcomm_group **handle);

// Makes another handle of the same group, to be freed, that keeps `owner`, whatever that is: `release(owner)` is
// called once, on any thread, when the handle is freed and every operation called with it has released its memory,
// also after an error. So a caller can pass on the owner of its buffers, and need not call `rcomm_work_released`. If
// this call itself fails, `release` is not called.
//
// # Safety
// `group` is a valid handle; `release` may be called once with `owner`, on any thread; `handle` may be written.
int32_t rcomm_group_keeping(const struct rcomm_group *group,
                            void *owner,
                            void (*release)(void *owner),
                            struct rcomm_group **handle);

// Keeps the operations on buffers that are called with this handle from now on, until `rcomm_end_coalescing` issues
// them as one. They may differ in kind and in element type, but collectives must not be mixed with messages, and all
// ranks must keep the same collectives. The memory of an operation is in use from its own call on.
//
// # Safety
// `group` is a valid handle.
int32_t rcomm_start_coalescing(const struct rcomm_group *group);

// Issues the operations that were kept since `rcomm_start_coalescing` as one. If there are none, `*work` is NULL.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_end_coalescing(const struct rcomm_group *group,
                             struct rcomm_work **work);

// Writes how long NCCL expects the collective that was kept since `rcomm_start_coalescing` to take on the device, in
// nanoseconds, and drops it: nothing is sent. All members call this with the same collective. It fails with
// `RCOMM_INVALID_ARGUMENT` if not exactly one operation was kept, and with `RCOMM_UNSUPPORTED` if the backend has no
// model of the operation.
//
// # Safety
// `group` is a valid handle; `nanoseconds` may be written.
int32_t rcomm_estimate_coalesced(const struct rcomm_group *group,
                                 uint64_t *nanoseconds);

// Makes a group of the members that are left when these ranks of the world are lost. All members that are left call
// this with the same list. Waits for them, for the time-out of `group` at most. `group` may be open or aborted.
//
// # Safety
// `group` is a valid handle; `without` holds `count` ranks; `left` may be written.
int32_t rcomm_group_shrink(const struct rcomm_group *group,
                           const uint32_t *without,
                           size_t count,
                           struct rcomm_group **left);

// For a group that has failed: writes to `*json` an array of the members that do not call this within `within_ms`, by
// their ranks in the world. All members that call this get the same list.
//
// # Safety
// `group` is a valid handle; `json` may be written, and its text is freed with `rcomm_text_free`.
int32_t rcomm_find_absent(const struct rcomm_group *group,
                          uint64_t within_ms,
                          char **json);

// Writes to `*json` the group's progress on this rank: name, purpose, members, the numbers of the newest collective
// that was issued, that has started and that has completed (-1 if none), and why the group refuses operations (null if
// it does not). Takes no lock, so this works also while operations hang.
//
// # Safety
// `group` is a valid handle; `json` may be written, and its text is freed with `rcomm_text_free`.
int32_t rcomm_group_status(const struct rcomm_group *group,
                           char **json);

// A barrier whose error names the ranks that did not arrive: only the first, in the order of the group's ranks, or all
// of them if `all` is not 0. After a failure the group is still usable.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_monitored_barrier(const struct rcomm_group *group,
                                int32_t all,
                                struct rcomm_work **work);

// Aborts the group: pending operations fail soon, and later ones at once, with this reason.
//
// # Safety
// `group` is a valid handle, `reason` a text that ends with a zero byte.
int32_t rcomm_group_abort(const struct rcomm_group *group, const char *reason);

// Waits for pending operations, closes the group, and frees this handle.
//
// # Safety
// `group` is a valid handle that is not used afterwards.
int32_t rcomm_group_destroy(struct rcomm_group *group);

// Frees this handle; the group stays open. NULL has no effect.
//
// # Safety
// `group` is NULL or a valid handle that is not used afterwards.
void rcomm_group_free(struct rcomm_group *group);

// Makes a group along each of `count` named dimensions of all ranks, in row-major order: along the last dimension
// ranks are consecutive. Writes `count` handles to `groups`, to be freed. Records and errors describe a group as `tp
// of pp 3, dp 0`. All ranks call this with the same dimensions.
//
// # Safety
// `world` is a valid handle; `names` holds `count` texts that end with a zero byte, `sizes` holds `count` numbers;
// `count` handles may be written to `groups`.
int32_t rcomm_device_mesh(const struct rcomm_world *world,
                          const char *const *names,
                          const uint32_t *sizes,
                          size_t count,
                          struct rcomm_group **groups);

// Like `rcomm_new_group`, but all calls with the same list and purpose return the same group.
//
// # Safety
// See `rcomm_new_group`.
int32_t rcomm_shared_group(const struct rcomm_world *world,
                           const uint32_t *ranks,
                           size_t count,
                           const char *purpose,
                           struct rcomm_group **group);

// Makes one group of the members of several groups that do not know each other. All members of these groups call this,
// each with its own group, the same purpose, and the number of all members. Waits for them, for the time-out of
// `group` at most.
//
// # Safety
// `world` and `group` are valid handles; `purpose` is a text that ends with a zero byte; `merged` may be written.
int32_t rcomm_merge(const struct rcomm_world *world,
                    const struct rcomm_group *group,
                    uint32_t size,
                    const char *purpose,
                    struct rcomm_group **merged);

// Makes a world of the members of several groups, which may be of different jobs: a job of its own, named by the
// purpose, with the options of `config`. All members of these groups call this, each with its own group, the same
// purpose, the number of all members, and the same store: that of `rcomm_config_set_store`, or else, as its client,
// the TCPStore at `MASTER_ADDR` and `MASTER_PORT` (with `RCOMM_STORE` = `secret` if it asks for a proof of the
// secret), which must be served by a process that outlives the new world. Waits for all members, for the time-out of
// `group` at most, then for the time-out of the start at most. `rcomm_world_group` then gives the group of all
// members, in which the old groups follow each other by the names of their jobs. Old worlds and groups stay open.
//
// # Safety
// `world`, `group` and `config` are valid handles; `purpose` is a text that ends with a zero byte; `merged` may be
// written.
int32_t rcomm_merge_remote(const struct rcomm_world *world,
                           const struct rcomm_group *group,
                           uint32_t size,
                           const char *purpose,
                           const struct rcomm_config *config,
                           struct rcomm_world **merged);

// Makes a handle to the group with this name, to be freed; `*group` is NULL if there is none.
//
// # Safety
// `world` is a valid handle; `name` is a text that ends with a zero byte; `group` may be written.
int32_t rcomm_group_named(const struct rcomm_world *world,
                          const char *name,
                          struct rcomm_group **group);

// Divides the group into groups of `size` members with consecutive ranks, and writes this rank's group to `*part`.
// All members call this.
//
// # Safety
// `group` is a valid handle; `purpose` is a text that ends with a zero byte; `part` may be written.
int32_t rcomm_new_subgroups(const struct rcomm_group *group,
                            uint32_t size,
                            const char *purpose,
                            struct rcomm_group **part);

// Sets the time-out of operations issued from now on, on this rank, in all groups that exist.
//
// # Safety
// `world` is a valid handle.
int32_t rcomm_set_timeouts(const struct rcomm_world *world, uint64_t timeout_ms);

// Extends the time-out of the next operations in all groups that exist, like `rcomm_group_extend_timeout`.
//
// # Safety
// `world` is a valid handle.
int32_t rcomm_extend_timeouts(const struct rcomm_world *world,
                              uint64_t extra_ms);

// Measures from now on how long the operations of all groups that exist run (`duration_ms` in records); stops
// measuring if `on` is 0. The NCCL backend measures on the device. Fails with `RCOMM_UNSUPPORTED` if a group's backend
// can be timed neither on the host nor by itself.
//
// # Safety
// `world` is a valid handle.
int32_t rcomm_set_timing(const struct rcomm_world *world,
                         int32_t on);

// Like `rcomm_set_timing`, for one group.
//
// # Safety
// `group` is a valid handle.
int32_t rcomm_group_set_timing(const struct rcomm_group *group, int32_t on);

// Waits until no operation that was called with a `work` is pending in any group, for `timeout_ms` at most.
//
// # Safety
// `world` is a valid handle.
int32_t rcomm_wait_for_pending(const struct rcomm_world *world,
                               uint64_t timeout_ms);

// Aborts all groups, the newest first, with this reason.
//
// # Safety
// `world` is a valid handle; `reason` is a text that ends with a zero byte.
int32_t rcomm_abort_groups(const struct rcomm_world *world, const char *reason);

// Calls `begun(context, operation)` for each operation that this rank issues in the group from now on, and
// `ended(context, operation, code)` when an operation ends; `code` is its result. For an operation that was issued
// before and ends later, `ended` is called without `begun`. One of the two functions may be NULL. A hook cannot be
// replaced: `RCOMM_INVALID_ARGUMENT` if the group has one.
//
// `begun` is called on the thread that issues the operation, while the group takes no other operation; `ended` on a
// thread of rcomm, or on one that waits for the operation or asks about it, and a thread that waits may go on
// meanwhile. Both must be short, must not wait, and must not use the group.
//
// # Safety
// `group` is a valid handle; the functions may be called with `context`, on any thread, as long as the group exists.
// The group may exist after `rcomm_world_free` has returned: as long as there is a handle of the group or of one of
// its operations, and while one of them ends on a thread of rcomm. A `context` that stays valid until the process ends
// is always right.
int32_t rcomm_group_set_hook(const struct rcomm_group *group,
                             void (*begun)(void *context,
                                           const struct rcomm_hooked_operation *operation),
                             void (*ended)(void *context,
                                           const struct rcomm_hooked_operation *operation,
                                           int32_t code),
                             void *context);

// `outputs[r]`, with `counts[r]` elements, ends as rank r's `input`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_gather_v(const struct rcomm_group *group,
                           const void *input,
                           void *const *outputs,
                           const size_t *counts,
                           uint8_t dtype,
                           struct rcomm_work **work);

// `outputs[r]`, with `count` elements, ends as rank r's `input`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_gather(const struct rcomm_group *group,
                         const void *input,
                         void *const *outputs,
                         size_t count,
                         uint8_t dtype,
                         struct rcomm_work **work);

// `output` ends as the reduction, over all ranks, of `inputs[caller's rank]`; `inputs[r]` has `counts[r]` elements.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_reduce_scatter_v(const struct rcomm_group *group,
                               const void *const *inputs,
                               void *output,
                               const size_t *counts,
                               uint8_t dtype,
                               struct rcomm_reduction reduction,
                               struct rcomm_work **work);

// `output`, with `count` elements, ends as the reduction, over all ranks, of `inputs[caller's rank]`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_reduce_scatter(const struct rcomm_group *group,
                             const void *const *inputs,
                             void *output,
                             size_t count,
                             uint8_t dtype,
                             struct rcomm_reduction reduction,
                             struct rcomm_work **work);

// `outputs[r]`, with `output_counts[r]` elements, ends as rank r's `inputs[caller's rank]`; `inputs[r]` has
// `input_counts[r]` elements.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_to_all(const struct rcomm_group *group,
                         const void *const *inputs,
                         const size_t *input_counts,
                         void *const *outputs,
                         const size_t *output_counts,
                         uint8_t dtype,
                         struct rcomm_work **work);

// On the root, `outputs[r]`, with `counts[r]` elements, ends as rank r's `input`. All ranks pass all counts.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_gather_v(const struct rcomm_group *group,
                       const void *input,
                       void *const *outputs,
                       const size_t *counts,
                       uint8_t dtype,
                       uint32_t root,
                       struct rcomm_work **work);

// On the root, `outputs[r]`, with `count` elements, ends as rank r's `input`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_gather(const struct rcomm_group *group,
                     const void *input,
                     void *const *outputs,
                     size_t count,
                     uint8_t dtype,
                     uint32_t root,
                     struct rcomm_work **work);

// `output` ends as the root's `inputs[caller's rank]`, with `counts[caller's rank]` elements. All ranks pass all
// counts.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_scatter_v(const struct rcomm_group *group,
                        const void *const *inputs,
                        void *output,
                        const size_t *counts,
                        uint8_t dtype,
                        uint32_t root,
                        struct rcomm_work **work);

// `output`, with `count` elements, ends as the root's `inputs[caller's rank]`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_scatter(const struct rcomm_group *group,
                      const void *const *inputs,
                      void *output,
                      size_t count,
                      uint8_t dtype,
                      uint32_t root,
                      struct rcomm_work **work);

// `buffers[i]`, with `counts[i]` elements, ends as the reduction of all ranks' `buffers[i]`, for each of `length`
// buffers; as one operation.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_reduce_coalesced(const struct rcomm_group *group,
                                   void *const *buffers,
                                   const size_t *counts,
                                   size_t length,
                                   uint8_t dtype,
                                   struct rcomm_reduction reduction,
                                   struct rcomm_work **work);

// Like `rcomm_all_gather_single` for each of `length` pairs of buffers, as one operation.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_all_gather_coalesced(const struct rcomm_group *group,
                                   const void *const *inputs,
                                   void *const *outputs,
                                   const size_t *counts,
                                   size_t length,
                                   uint8_t dtype,
                                   struct rcomm_work **work);

// Like `rcomm_reduce_scatter_single` for each of `length` pairs of buffers, as one operation.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_reduce_scatter_coalesced(const struct rcomm_group *group,
                                       const void *const *inputs,
                                       void *const *outputs,
                                       const size_t *counts,
                                       size_t length,
                                       uint8_t dtype,
                                       struct rcomm_reduction reduction,
                                       struct rcomm_work **work);

// Sends `count` elements to `peer`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_send(const struct rcomm_group *group,
                   const void *buffer,
                   size_t count,
                   uint8_t dtype,
                   uint32_t peer,
                   uint32_t tag,
                   struct rcomm_work **work);

// Receives `count` elements from `peer`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_recv(const struct rcomm_group *group,
                   void *buffer,
                   size_t count,
                   uint8_t dtype,
                   uint32_t peer,
                   uint32_t tag,
                   struct rcomm_work **work);

// Receives `count` elements from any rank. A blocking call writes the sender's rank to `*source`, unless that is NULL;
// with `work`, `rcomm_work_source` returns it.
//
// # Safety
// See "Handles and memory" in rcomm.h; `source` is NULL or may be written.
int32_t rcomm_recv_any(const struct rcomm_group *group,
                       void *buffer,
                       size_t count,
                       uint8_t dtype,
                       uint32_t tag,
                       uint32_t *source,
                       struct rcomm_work **work);

// Starts `length` sends and receives at once. They do not wait for each other, so both ends may list them in any
// order.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_batch_isend_irecv(const struct rcomm_group *group,
                                const struct rcomm_message *messages,
                                size_t length,
                                struct rcomm_work **work);

// Writes the root's `json` to `*out` on every rank; the `json` of the other ranks is ignored.
//
// # Safety
// See "Handles and memory" in rcomm.h; `json` is NULL or a text that ends with a zero byte; `out`
// may be written unless there is a `work`.
int32_t rcomm_broadcast_object(const struct rcomm_group *group,
                               const char *json,
                               uint32_t root,
                               char **out,
                               struct rcomm_work **work);

// Writes to `*out` a JSON array of the `json` of all ranks, by rank.
//
// # Safety
// See "Handles and memory" in rcomm.h; `json` is a text that ends with a zero byte; `out` may be
// written unless there is a `work`.
int32_t rcomm_all_gather_object(const struct rcomm_group *group,
                                const char *json,
                                char **out,
                                struct rcomm_work **work);

// Writes to `*out` a JSON array of the `json` of all ranks, by rank, on the root, and `null` on the other ranks.
//
// # Safety
// See "Handles and memory" in rcomm.h; `json` is a text that ends with a zero byte; `out` may be
// written unless there is a `work`.
int32_t rcomm_gather_object(const struct rcomm_group *group,
                            const char *json,
                            uint32_t root,
                            char **out,
                            struct rcomm_work **work);

// Writes to `*out` this rank's element of the root's `json`, an array with one element per rank; the `json` of the
// other ranks is ignored.
//
// # Safety
// See "Handles and memory" in rcomm.h; `json` is NULL or a text that ends with a zero byte; `out`
// may be written unless there is a `work`.
int32_t rcomm_scatter_object(const struct rcomm_group *group,
                             const char *json,
                             uint32_t root,
                             char **out,
                             struct rcomm_work **work);

// Sends a value to `peer`, which receives it with `rcomm_recv_object`.
//
// # Safety
// See "Handles and memory" in rcomm.h; `json` is a text that ends with a zero byte.
int32_t rcomm_send_object(const struct rcomm_group *group,
                          const char *json,
                          uint32_t peer,
                          uint32_t tag,
                          struct rcomm_work **work);

// Writes to `*out` the value that `peer` sends. With `work`, several receives of values may be in progress; until all
// of them have ended, nothing else may be received from this peer with this tag.
//
// # Safety
// See "Handles and memory" in rcomm.h; `out` may be written unless there is a `work`.
int32_t rcomm_recv_object(const struct rcomm_group *group,
                          uint32_t peer,
                          uint32_t tag,
                          char **out,
                          struct rcomm_work **work);

// Takes the text of the value that `work` has produced, once; fails with `RCOMM_INVALID_ARGUMENT` if there is none, or
// not yet. Does not wait for the operation.
//
// # Safety
// `work` is a valid handle; `out` may be written.
int32_t rcomm_work_text(const struct rcomm_work *work,
                        char **out);

// Frees a text that a function of this header returned. NULL has no effect.
//
// # Safety
// `text` is NULL or such a text, and is not used afterwards.
void rcomm_text_free(char *text);

// Makes a reducer for a model with `count` parameters, whose names and numbers of elements are in `names` and `lens`.
// All have the element type `dtype`: RCOMM_F32, RCOMM_F64, RCOMM_F16 or RCOMM_BF16. Gradients are averaged in buckets
// that take parameters until they have `bucket_bytes`, the first one `first_bytes`; 0 = the defaults. If `find_unused`
// is not 0, parameters may have no gradient in a step. Waits until all ranks of the group have called this; give the
// reducer a group of its own.
//
// # Safety
// `group` is a valid handle; `names` holds `count` texts that end with a zero byte, `lens` holds `count` numbers;
// `reducer` may be written.
int32_t rcomm_reducer_new(const struct rcomm_group *group,
                          const char *const *names,
                          const uint64_t *lens,
                          size_t count,
                          uint8_t dtype,
                          size_t first_bytes,
                          size_t bucket_bytes,
                          int32_t find_unused,
                          struct rcomm_reducer **reducer);

// Like `rcomm_reducer_new`, with further options: a JSON object with any of these keys, the same on all ranks. NULL =
// none.
//
// `first_bytes`, `bucket_bytes`: the sizes of buckets. `unused`: `"find"` if parameters may have no gradient in a
// step. `uneven`: `"divide_by_size"` or `"divide_by_active"` if ranks may run out of input before others: they then
// call `rcomm_reducer_join`. `static_graph`: `true` if each rank uses the same parameters in each step.
// `rebuild_buckets`: `false` if buckets are not formed anew after the first step. `wire`: `"f16"` or `"bf16"`, the
// type in which gradients are sent. `hook`: `"int8"` sends them in 8 bits; `{"power_sgd": {"rank": 2, "start": 10}}`
// sends, after the first `start` steps, two thin matrices in place of each gradient that is at least twice as large as
// they are (`rank` is the rank of these matrices, not that of a process), and
// `{"batched_power_sgd": {"rank": 1, "start": 10}}` sends two in place of each bucket;
// `{"post_local_sgd": {"ranks": 4, "start": 100}}` averages, after the first `start` steps, only among each 4 ranks
// that follow each other in the group (1 = each goes on alone), and the program averages the parameters over all ranks
// every few steps. `shapes`: a list of a shape for each parameter, with as many elements as `lens` says; without it
// each has one dimension. `sparse`: the positions of parameters whose gradients are given as rows
// (`rcomm_reducer_ready_sparse`). `delayed`: the positions of parameters whose gradients are sent in one bucket behind
// all others, or behind that of the parameter `delayed_until`.
//
// # Safety
// See `rcomm_reducer_new`; `options` is NULL, or a text that ends with a zero byte.
int32_t rcomm_reducer_new_with(const struct rcomm_group *group,
                               const char *const *names,
                               const uint64_t *lens,
                               size_t count,
                               uint8_t dtype,
                               const char *options,
                               struct rcomm_reducer **reducer);

// Writes the address and the number of elements of a parameter's gradient in this step: a part of the memory that is
// sent, in which all elements are zero until they are written in this step. Write the gradient there before the next
// call with this reducer. Fails for a gradient that is ready, and for a sparse parameter.
//
// # Safety
// `reducer` is a valid handle; `gradient` and `len` may be written.
int32_t rcomm_reducer_gradient(const struct rcomm_reducer *reducer,
                               size_t parameter,
                               void **gradient,
                               size_t *len);

// Says that a parameter's gradient is complete. Sends the gradient's bucket if all gradients of it are complete now
// and all buckets before it were sent. Does not wait for other ranks, except for the groups that the hook
// `post_local_sgd` makes in its first step after `start`.
//
// # Safety
// `reducer` is a valid handle.
int32_t rcomm_reducer_ready(const struct rcomm_reducer *reducer,
                            size_t parameter);

// Like `rcomm_reducer_ready`, for a parameter of the option `sparse`: gives `nnz` rows of the parameter's gradient;
// the other rows are zero. A row that is named more than once counts as the sum.
//
// # Safety
// `reducer` is a valid handle; `indices` holds `nnz` numbers of rows, and `values` their elements, one row after the
// other; both are copied.
int32_t rcomm_reducer_ready_sparse(const struct rcomm_reducer *reducer,
                                   size_t parameter,
                                   const int64_t *indices,
                                   const void *values,
                                   size_t nnz);

// Waits for the averages of this step, as long as the time-outs of the operations allow. Gradients that were written
// and are not ready count as complete. Fails for a parameter without a gradient, unless unused parameters are allowed.
//
// # Safety
// `reducer` is a valid handle.
int32_t rcomm_reducer_finish(const struct rcomm_reducer *reducer);

// Writes the address and the number of elements of a parameter's average in the last step; NULL and 0 if no rank has
// used the parameter. The average may be read and changed until the next call with this reducer.
//
// # Safety
// `reducer` is a valid handle; `average` and `len` may be written.
int32_t rcomm_reducer_average(const struct rcomm_reducer *reducer,
                              size_t parameter,
                              void **average,
                              size_t *len);

// Writes to `*out` the average of a sparse parameter's gradient in the last step, with its rows in ascending order;
// NULL if no rank has used the parameter.
//
// # Safety
// `reducer` is a valid handle; `out` may be written, and its tensor is freed with `rcomm_sparse_free`.
int32_t rcomm_reducer_sparse_average(const struct rcomm_reducer *reducer,
                                     size_t parameter,
                                     struct rcomm_sparse **out);

// Takes part in the steps of the others, with gradients of zero, until all ranks have called this: for a rank that has
// no input left. Every rank calls this once at the end. Needs the option `uneven`. Writes to `*shadowed` in how many
// steps this rank took part in that way, and to `*last` a rank of the group that had input in every step, the same on
// all ranks: that rank's parameters are those after all steps, and the others take its parameters (`rcomm_broadcast`).
// Waits for the others.
//
// # Safety
// `reducer` is a valid handle; `shadowed` and `last` are NULL or may be written.
int32_t rcomm_reducer_join(const struct rcomm_reducer *reducer,
                           uint64_t *shadowed,
                           uint32_t *last);

// Notes that the forward pass of the next step begins, for the statistics.
//
// # Safety
// `reducer` is a valid handle.
int32_t rcomm_reducer_begin_forward(const struct rcomm_reducer *reducer);

// Writes to `*json` how long the last step took, in milliseconds: forward, backward, communication, how much of the
// communication was hidden and exposed, and each bucket.
//
// # Safety
// `reducer` is a valid handle; `json` may be written, and its text is freed with `rcomm_text_free`.
int32_t rcomm_reducer_statistics(const struct rcomm_reducer *reducer,
                                 char **json);

// Continues in another group, after ranks were lost or have joined; a step that is not finished is given up. All ranks
// of `group` call this and wait for each other; ranks that have joined instead call `rcomm_reducer_new` at the same
// time.
//
// # Safety
// `reducer` and `group` are valid handles.
int32_t rcomm_reducer_regroup(const struct rcomm_reducer *reducer,
                              const struct rcomm_group *group);

// Frees a reducer. NULL has no effect.
//
// # Safety
// `reducer` is NULL or a valid handle that is not used afterwards.
void rcomm_reducer_free(struct rcomm_reducer *reducer);

// Sums the sparse tensors (COO) of all ranks. The result, `*out` or the tensor that `rcomm_work_sparse` takes from
// `work`, is coalesced: each index tuple occurs once, in ascending order.
//
// The tensor has `dims` dimensions with the sizes in `shape`; the first `sparse_dims` of them are sparse. `indices`
// holds a row of `nnz` indices for each sparse dimension. `values` holds `nnz` blocks, each with all elements of the
// remaining dimensions (one element if there are none).
//
// # Safety
// `group` is a valid handle; `shape`, `indices` and `values` hold what is described above, and are copied; `out` may
// be written, and may be NULL only if `work` is not NULL; `work` is NULL or may be written.
int32_t rcomm_all_reduce_sparse(const struct rcomm_group *group,
                                const uint64_t *shape,
                                size_t dims,
                                size_t sparse_dims,
                                const int64_t *indices,
                                const void *values,
                                size_t nnz,
                                uint8_t dtype,
                                struct rcomm_sparse **out,
                                struct rcomm_work **work);

// Takes the sum that `work` has produced, once; fails with `RCOMM_INVALID_ARGUMENT` if there is none, or not yet. Does
// not wait for the operation.
//
// # Safety
// `work` is a valid handle; `out` may be written.
int32_t rcomm_work_sparse(const struct rcomm_work *work,
                          struct rcomm_sparse **out);

// Writes the number of index tuples of a sparse tensor and the addresses of its indices and its values; the addresses
// are valid until the tensor is freed. Each output pointer may be NULL.
//
// # Safety
// `sparse` is a valid handle; `nnz`, `indices` and `values` are NULL or may be written.
int32_t rcomm_sparse_get(const struct rcomm_sparse *sparse,
                         size_t *nnz,
                         const int64_t **indices,
                         const void **values);

// Frees a sparse tensor. NULL has no effect.
//
// # Safety
// `sparse` is NULL or a valid handle that is not used afterwards.
void rcomm_sparse_free(struct rcomm_sparse *sparse);

// Returns the text of the last error that a function returned to this thread; empty if none did. Valid until this
// thread calls rcomm again, or ends.
const char *rcomm_last_error(void);

// Puts `length` bytes, which are copied, into the value that a function of a store, or a handler, was given.
//
// # Safety
// `value` is the pointer that the function got, and the function has not returned; `length` bytes lie at `bytes`,
// which may be NULL if there are none.
int32_t rcomm_value_set(const struct rcomm_value *value,
                        const uint8_t *bytes,
                        size_t length);

// Makes memory of `bytes` bytes on each rank, all zero, which all ranks of the group use in place. All members call
// this, with the same size. Fails with `RCOMM_UNSUPPORTED`, on all members, if these are on several hosts or cannot
// share memory.
//
// # Safety
// `group` is a valid handle; `memory` may be written.
int32_t rcomm_symmetric_new(const struct rcomm_group *group,
                            size_t bytes,
                            struct rcomm_symmetric **memory);

// Writes the address and the length of the buffer of `peer`, or of the caller, which are valid until the memory is
// closed or freed. Other ranks may write there at any time: use atomic operations, or order accesses by signals.
//
// # Safety
// `memory` is a valid handle; `start` and `bytes` may be written.
int32_t rcomm_symmetric_buffer(const struct rcomm_symmetric *memory,
                               uint32_t peer,
                               void **start,
                               size_t *bytes);

// Writes the address and the length of the signal pad of `peer`, or of the caller, like `rcomm_symmetric_buffer`: the
// four bytes of channel `c` and sender `s` are at `4 * (c * size + s)`. A program that writes to a channel must set
// its bytes to zero again before the functions below use the channel.
//
// # Safety
// `memory` is a valid handle; `start` and `bytes` may be written.
int32_t rcomm_symmetric_signal_pad(const struct rcomm_symmetric *memory,
                                   uint32_t peer,
                                   void **start,
                                   size_t *bytes);

// Signals to `peer` on a channel (0 to 63). First waits until `peer` has taken this rank's earlier signal on the
// channel, for the group's time-out at most.
//
// # Safety
// `memory` is a valid handle.
int32_t rcomm_symmetric_put_signal(const struct rcomm_symmetric *memory,
                                   uint32_t peer,
                                   uint32_t channel);

// Waits for a signal of `peer` on a channel, for the group's time-out at most, and takes it.
//
// # Safety
// `memory` is a valid handle.
int32_t rcomm_symmetric_wait_signal(const struct rcomm_symmetric *memory,
                                    uint32_t peer,
                                    uint32_t channel);

// Returns once all members have called this on this channel: signals to each other member, then waits for the signal
// of each.
//
// # Safety
// `memory` is a valid handle.
int32_t rcomm_symmetric_barrier(const struct rcomm_symmetric *memory,
                                uint32_t channel);

// Sets `count` words of four bytes of this rank's buffer, from word `offset` on. Other ranks see the words after a
// signal.
//
// # Safety
// `memory` is a valid handle.
int32_t rcomm_symmetric_fill(const struct rcomm_symmetric *memory,
                             size_t offset,
                             uint32_t value,
                             size_t count);

// Waits until all members have called this, for the group's time-out at most, and frees memory and handle; the handle
// also after an error.
//
// # Safety
// `memory` is a valid handle that is not used afterwards, nor is the memory.
int32_t rcomm_symmetric_close(struct rcomm_symmetric *memory);

// Frees memory and handle at once; other ranks that wait for a signal of this one get an error or reach their
// time-out. NULL has no effect.
//
// # Safety
// `memory` is NULL or a valid handle that is not used afterwards, nor is the memory.
void rcomm_symmetric_free(struct rcomm_symmetric *memory);

// Makes collectives of the ranks of `rcomm_world_group`, with their numbers there, over the store at which the ranks
// found each other. All these ranks make collectives of the same name, and call the same functions with them in the
// same order. The name distinguishes their keys from others in the store. They also have the number of the world's
// attempt, so a name is used once in an attempt: a job that is started again may use it again. A call waits for
// `timeout_ms` at most, and after a time-out for two seconds more to find out which ranks did not come: the error's
// text names them.
//
// # Safety
// `world` is a valid handle; `name` is a text that ends with a zero byte; `made` may be written.
int32_t rcomm_store_collectives_new(const struct rcomm_world *world,
                                    const char *name,
                                    struct rcomm_store_collectives **made);

// Like `rcomm_store_collectives_new`, of `size` ranks, for rank `rank`, over the store that `rcomm_config_set_store`
// has set: it needs no world. The keys have no number of an attempt: a name is used once in the life of the store, so
// where the store outlives an attempt of the job, the program puts a number of the attempt into the name.
// `RCOMM_INVALID_ARGUMENT` if no store was set.
//
// # Safety
// `config` is a valid handle; `name` is a text that ends with a zero byte; `made` may be written.
int32_t rcomm_store_collectives_with(const struct rcomm_config *config,
                                     const char *name,
                                     uint32_t rank,
                                     uint32_t size,
                                     struct rcomm_store_collectives **made);

// Frees the handle; the store keeps the values of its last calls. NULL has no effect.
//
// # Safety
// `collectives` is NULL or a valid handle that is not used afterwards.
void rcomm_store_collectives_free(struct rcomm_store_collectives *collectives);

// Returns once all ranks have called it.
//
// # Safety
// `collectives` is a valid handle.
int32_t rcomm_store_barrier(const struct rcomm_store_collectives *collectives, uint64_t timeout_ms);

// Writes the sum of the numbers of all ranks, on all ranks; it wraps.
//
// # Safety
// `collectives` is a valid handle; `sum` may be written.
int32_t rcomm_store_all_sum(const struct rcomm_store_collectives *collectives,
                            int64_t number,
                            uint64_t timeout_ms,
                            int64_t *sum);

// Writes the values of all ranks, by rank, on all ranks. Free them with `rcomm_values_free`.
//
// # Safety
// `collectives` is a valid handle; `length` bytes lie at `bytes`, which may be NULL if there are none; `values` may be
// written.
int32_t rcomm_store_all_gather(const struct rcomm_store_collectives *collectives,
                               const uint8_t *bytes,
                               size_t length,
                               uint64_t timeout_ms,
                               struct rcomm_values **values);

// Writes one value, that of `root`, on all ranks. `root` does not wait; the bytes of the other ranks are ignored. Free
// the value with `rcomm_values_free`.
//
// # Safety
// `collectives` is a valid handle; on `root` `length` bytes lie at `bytes`, which may be NULL if there are none;
// `values` may be written.
int32_t rcomm_store_broadcast(const struct rcomm_store_collectives *collectives,
                              const uint8_t *bytes,
                              size_t length,
                              uint32_t root,
                              uint64_t timeout_ms,
                              struct rcomm_values **values);

// Writes the values of all ranks, by rank, on `root`, and NULL on the other ranks, which do not wait. Free them with
// `rcomm_values_free`.
//
// # Safety
// `collectives` is a valid handle; `length` bytes lie at `bytes`, which may be NULL if there are none; `values` may be
// written.
int32_t rcomm_store_gather(const struct rcomm_store_collectives *collectives,
                           const uint8_t *bytes,
                           size_t length,
                           uint32_t root,
                           uint64_t timeout_ms,
                           struct rcomm_values **values);

// Writes one value: this rank's of the `count` values that `root` passes, one for each rank, by rank. `root` does not
// wait; the lists of the other ranks are ignored. Free the value with `rcomm_values_free`.
//
// # Safety
// `collectives` is a valid handle; on `root`, `list` and `lengths` have `count` members, and as many bytes as its
// length says lie at each pointer of `list`, which may be NULL if there are none; `values` may be written.
int32_t rcomm_store_scatter(const struct rcomm_store_collectives *collectives,
                            const uint8_t *const *list,
                            const size_t *lengths,
                            size_t count,
                            uint32_t root,
                            uint64_t timeout_ms,
                            struct rcomm_values **values);

// Writes the number of the values.
//
// # Safety
// `values` is a valid handle; `count` may be written.
int32_t rcomm_values_count(const struct rcomm_values *values, size_t *count);

// Writes where the value of this number is, and its length in bytes. The bytes are valid until the values are freed.
// `RCOMM_INVALID_ARGUMENT` if there is no such value.
//
// # Safety
// `values` is a valid handle; `bytes` and `length` may be written.
int32_t rcomm_values_get(const struct rcomm_values *values,
                         size_t number,
                         const uint8_t **bytes,
                         size_t *length);

// Frees the values. NULL has no effect.
//
// # Safety
// `values` is NULL or a valid handle that is not used afterwards, nor are the bytes of its values.
void rcomm_values_free(struct rcomm_values *values);

// Takes the window that `work` has made, once; fails with `RCOMM_INVALID_ARGUMENT` if there is none, or not yet. Does
// not wait for the operation.
//
// # Safety
// `work` is a valid handle; `window` may be written.
int32_t rcomm_work_window(const struct rcomm_work *work,
                          struct rcomm_window **window);

// Makes a window over `count` new elements on this rank, all zero: other ranks access this memory faster than that of
// `rcomm_new_window`. All members call this or `rcomm_new_window`, with the same element type; counts may differ, and
// may be 0. With `work`, `window` is ignored and `rcomm_work_window` returns the window. With a handle of
// `rcomm_group_on_stream` the elements are on the device, and so are the buffers of `rcomm_window_put` and
// `rcomm_window_get`.
//
// # Safety
// See "Handles and memory" in rcomm.h; `window` may be written unless there is a `work`.
int32_t rcomm_window_allocate(const struct rcomm_group *group,
                              size_t count,
                              uint8_t dtype,
                              struct rcomm_window **window,
                              struct rcomm_work **work);

// Makes a window over the caller's memory, which must stay valid and must not be used otherwise until the window is
// closed or freed. `work` is as in `rcomm_window_allocate`.
//
// # Safety
// See "Handles and memory" in rcomm.h; `window` may be written unless there is a `work`.
int32_t rcomm_new_window(const struct rcomm_group *group,
                         void *memory,
                         size_t count,
                         uint8_t dtype,
                         struct rcomm_window **window,
                         struct rcomm_work **work);

// Writes the number of elements in the part of `peer`.
//
// # Safety
// `window` is a valid handle; `count` may be written.
int32_t rcomm_window_count(const struct rcomm_window *window, uint32_t peer, size_t *count);

// Writes `count` elements into the part of `peer`, from element `offset` on; a signal tells the peer that they have
// arrived. Puts, gets and signals that this rank calls with `work` are carried out in the order of the calls.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_window_put(const struct rcomm_window *window,
                         uint32_t peer,
                         size_t offset,
                         const void *from,
                         size_t count,
                         struct rcomm_work **work);

// Reads `count` elements of the part of `peer`, from element `offset` on. With `work`, the order is that of
// `rcomm_window_put`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_window_get(const struct rcomm_window *window,
                         uint32_t peer,
                         size_t offset,
                         void *into,
                         size_t count,
                         struct rcomm_work **work);

// Signals to `peer` that everything that this rank has put into the part of `peer` before has arrived. Signals are
// counted. With `work`, the order is that of `rcomm_window_put`.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_window_signal(const struct rcomm_window *window,
                            uint32_t peer,
                            struct rcomm_work **work);

// Consumes one signal of `peer`; if there is none, waits for one, for the group's time-out at most. With `work`, the
// operation waits for no other call of this rank.
//
// # Safety
// See "Handles and memory" in rcomm.h.
int32_t rcomm_window_wait_signal(const struct rcomm_window *window,
                                 uint32_t peer,
                                 struct rcomm_work **work);

// Maps the part of `peer` into this process's address space, until the window is closed or freed: writes the part's
// address to `*start` and its length to `*bytes`. The peer and other ranks may write there at any time, so use atomic
// operations. Fails with `RCOMM_UNSUPPORTED` if the part is on another host, was not made by `rcomm_window_allocate`,
// or could not be mapped.
//
// # Safety
// `window` is a valid handle; `start` and `bytes` may be written.
int32_t rcomm_window_map(const struct rcomm_window *window,
                         uint32_t peer,
                         void **start,
                         size_t *bytes);

// Waits until all members have called this and this rank's puts, gets and signals have ended, for the group's time-out
// at most, and closes the window. Frees the handle, also after an error.
//
// # Safety
// `window` is a valid handle that is not used afterwards.
int32_t rcomm_window_close(struct rcomm_window *window);

// Closes the window at once and frees the handle: pending accesses of peers fail. NULL has no effect.
//
// # Safety
// `window` is NULL or a valid handle that is not used afterwards.
void rcomm_window_free(struct rcomm_window *window);

// Waits for the end of the operation, which its time-out guarantees, and returns its result.
//
// # Safety
// `work` is a valid handle.
int32_t rcomm_work_wait(const struct rcomm_work *work);

// Waits for at most `timeout_ms` (0 = does not wait, also while other threads wait for the operation). If the
// operation has ended, `*ended` is 1 and the returned code is its result; otherwise `*ended` is 0 and the operation
// continues. After an error that aborts the group this may wait until the rank's dump was made.
//
// # Safety
// `work` is a valid handle; `ended` may be written.
int32_t rcomm_work_test(const struct rcomm_work *work,
                        uint64_t timeout_ms,
                        int32_t *ended);

// Writes whether the memory may be used again: `*released` is 1 once `rcomm_work_wait` or `rcomm_work_test` has
// reported the end of the operation and the backend has released the memory. After an error `*released` may stay 0:
// the memory must then never be used again. The memory of a window belongs to the window until that is closed.
//
// # Safety
// `work` is a valid handle; `released` may be written.
int32_t rcomm_work_released(const struct rcomm_work *work,
                            int32_t *released);

// Calls `callback(context, code)` once, when the operation ends, or during this call if it has ended; `code` is the
// operation's result.
//
// The callback runs on a thread of rcomm, or on one that waits for the operation or asks about it. It must be short,
// must not wait for an operation, and must not use `work`.
//
// # Safety
// `work` is a valid handle; `callback` may be called with `context`, on any thread.
int32_t rcomm_work_on_completion(const struct rcomm_work *work,
                                 void (*callback)(void *context, int32_t code),
                                 void *context);

// Writes the sender, as a rank of the group, of a completed receive from any rank; fails with `RCOMM_INVALID_ARGUMENT`
// for any other operation. Does not wait for the operation.
//
// # Safety
// `work` is a valid handle; `source` may be written.
int32_t rcomm_work_source(const struct rcomm_work *work,
                          uint32_t *source);

// Aborts the operation and its group with this reason.
//
// # Safety
// `work` is a valid handle, `reason` a text that ends with a zero byte.
int32_t rcomm_work_abort(const struct rcomm_work *work, const char *reason);

// Frees the handle; an operation that has not ended continues and still uses its memory. NULL has no effect.
//
// # Safety
// `work` is NULL or a valid handle that is not used afterwards.
void rcomm_work_free(struct rcomm_work *work);

// Joins the job that the environment describes (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, or the variables
// of Slurm and MPI launchers; options from `RCOMM_*`). Returns once all ranks have joined.
//
// # Safety
// `world` may be written.
int32_t rcomm_init(struct rcomm_world **world);

// Joins the job at this address, with the defaults of all options: of the environment, only the NCCL backend's options
// are read. `timeout_ms` is the time-out of operations; 0 = the default.
//
// # Safety
// `address` is a text that ends with a zero byte; `world` may be written.
int32_t rcomm_init_at(uint32_t rank,
                      uint32_t world_size,
                      const char *address,
                      uint16_t port,
                      uint64_t timeout_ms,
                      struct rcomm_world **world);

// Writes this process's rank, and the number of ranks. Either pointer may be NULL.
//
// # Safety
// `world` is a valid handle; `rank` and `size` are NULL or may be written.
int32_t rcomm_world_place(const struct rcomm_world *world, uint32_t *rank, uint32_t *size);

// Makes a handle to the group of all ranks, or after `rcomm_shrink` of those that are left. Free it with
// `rcomm_group_free`.
//
// # Safety
// `world` is a valid handle; `group` may be written.
int32_t rcomm_world_group(const struct rcomm_world *world,
                          struct rcomm_group **group);

// Makes a group of these ranks of the world, in this order, for this purpose. These ranks call this, and no other rank
// does.
//
// # Safety
// `world` is a valid handle, `ranks` holds `count` ranks, `purpose` is a text that ends with a zero
// byte; `group` may be written.
int32_t rcomm_new_group(const struct rcomm_world *world,
                        const uint32_t *ranks,
                        size_t count,
                        const char *purpose,
                        struct rcomm_group **group);

// Waits for pending operations and then for the other ranks, closes all groups, and frees the world, also after an
// error. All ranks call this, after they have freed their groups and works.
//
// # Safety
// `world` is a valid handle that is not used afterwards.
int32_t rcomm_shutdown(struct rcomm_world *world);

// Like `rcomm_shutdown`, but waits for pending operations, and then for the other ranks, for `timeout_ms` at most
// each: for programs in which not every rank shuts down at the same time.
//
// # Safety
// `world` is a valid handle that is not used afterwards.
int32_t rcomm_shutdown_within(struct rcomm_world *world,
                              uint64_t timeout_ms);

// Continues without these ranks, after they were lost: `rcomm_world_group` then gives the group of the others, and
// groups with a lost member are aborted. All ranks that are left call this with the same list. Waits for them, for the
// time-out of the group of all ranks at most; meanwhile other calls with this world wait, except `rcomm_dump` and
// `rcomm_snapshot`. Ranks keep their numbers.
//
// # Safety
// `world` is a valid handle; `without` holds `count` ranks.
int32_t rcomm_shrink(const struct rcomm_world *world,
                     const uint32_t *without,
                     size_t count);

// Makes the world anew with `size` ranks: those that are left keep their numbers, and processes that join
// (`RCOMM_JOIN=1`) take the other numbers below `size`. All ranks that are left call this with the same size and the
// same list of lost ranks. Waits for all `size` ranks, for the time-out of the start at most; meanwhile other calls
// with this world wait, except `rcomm_dump` and `rcomm_snapshot`. `rcomm_world_group` then gives the group of all
// ranks; all other groups have ended.
//
// # Safety
// `world` is a valid handle; `lost` holds `count` ranks.
int32_t rcomm_grow(const struct rcomm_world *world,
                   const uint32_t *lost,
                   size_t count,
                   uint32_t size);

// Records what the program does from now on (such as `load data`), cut to 104 bytes; the empty text ends a phase.
//
// # Safety
// `world` is a valid handle; `name` is a text that ends with a zero byte.
int32_t rcomm_phase(const struct rcomm_world *world,
                    const char *name);

// Records which step the program is in.
//
// # Safety
// `world` is a valid handle.
int32_t rcomm_step(const struct rcomm_world *world, int64_t step);

// Writes this rank's dump to a file, and the file's path to `*path`, which `rcomm_text_free` frees. `path` may be
// NULL.
//
// # Safety
// `world` is a valid handle; `path` is NULL or may be written.
int32_t rcomm_dump(const struct rcomm_world *world,
                   char **path);

// Writes this rank's record, as it is now, to `*json`: what a dump has, as a text that `rcomm_text_free` frees.
//
// # Safety
// `world` is a valid handle; `json` may be written.
int32_t rcomm_snapshot(const struct rcomm_world *world,
                       char **json);

// Writes to `*json`, for each name of a wait, how often and for how long threads of this process have waited, and wait
// now: a list of objects with `name`, `count`, `total_ns`, `max_ns`, `waiting` and `waiting_ns`, like the answer to
// `GET /waits` of the rank's endpoint. `rcomm_text_free` frees the text.
//
// # Safety
// `world` is a valid handle; `json` may be written.
int32_t rcomm_waits(const struct rcomm_world *world,
                    char **json);

// Aborts all groups and frees the world: for use after an error. NULL has no effect.
//
// # Safety
// `world` is NULL or a valid handle that is not used afterwards.
void rcomm_world_free(struct rcomm_world *world);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RCOMM_H */
