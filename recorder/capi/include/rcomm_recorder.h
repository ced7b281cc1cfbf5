/*
 * rcomm's flight recorder: writes what one rank does into a ring that outlives its process.
 *
 * Generated from recorder/capi/src and the table of operations; a test compares the two.
 *
 * Any thread may call any function at any time, but for rcomm_recorder_close and rcomm_recorder_leave,
 * which end the handle. The functions that record (begin, started, completed, failed, retired, phase,
 * step, heartbeat) never block, never fail, and allocate nothing; those that add to a table (group,
 * members, call_site, signature) take a lock for the time of a copy: call them once and keep the number.
 * Operations of one group are begun in the order of issue.
 *
 * A child made by fork may hold its parent's handle: every function then does nothing. To record, the
 * child opens a ring of its own.
 *
 * Texts are UTF-8 and end with a zero byte; NULL is the empty text. What a call points to is copied before
 * it returns. The number is RCOMM_RECORDER_NONE where a table is full, and may be passed on.
 */

#ifndef RCOMM_RECORDER_H
#define RCOMM_RECORDER_H

#include <stddef.h>
#include <stdint.h>

// Every rank ends with the reduction of all inputs.
#define RCOMM_RECORDER_ALL_REDUCE 1

// Several tensors reduced as one operation.
#define RCOMM_RECORDER_ALL_REDUCE_COALESCED 2

// A reduction of sparse (COO) tensors.
#define RCOMM_RECORDER_ALL_REDUCE_SPARSE 3

// The reduction ends on the root alone.
#define RCOMM_RECORDER_REDUCE 4

// The root's tensor is copied to every rank.
#define RCOMM_RECORDER_BROADCAST 5

// No rank leaves before all have arrived.
#define RCOMM_RECORDER_BARRIER 6

// A barrier in which the root reports the ranks that did not arrive.
#define RCOMM_RECORDER_MONITORED_BARRIER 7

// Every rank ends with a list of all inputs.
#define RCOMM_RECORDER_ALL_GATHER 8

// Every rank ends with all inputs in one tensor.
#define RCOMM_RECORDER_ALL_GATHER_SINGLE 9

// As `all_gather`, inputs of different sizes.
#define RCOMM_RECORDER_ALL_GATHER_V 10

// Several tensors gathered as one operation.
#define RCOMM_RECORDER_ALL_GATHER_COALESCED 11

// Rank i ends with the reduction of all ranks' i-th inputs.
#define RCOMM_RECORDER_REDUCE_SCATTER 12

// As `reduce_scatter`, from one tensor.
#define RCOMM_RECORDER_REDUCE_SCATTER_SINGLE 13

// As `reduce_scatter`, parts of different sizes.
#define RCOMM_RECORDER_REDUCE_SCATTER_V 14

// Several tensors reduced and scattered as one operation.
#define RCOMM_RECORDER_REDUCE_SCATTER_COALESCED 15

// Every rank sends its i-th tensor to rank i.
#define RCOMM_RECORDER_ALL_TO_ALL 16

// As `all_to_all`, within one tensor of even parts.
#define RCOMM_RECORDER_ALL_TO_ALL_SINGLE 17

// As `all_to_all`, within one tensor of parts of any size.
#define RCOMM_RECORDER_ALL_TO_ALL_V_SINGLE 18

// The root ends with a list of all inputs.
#define RCOMM_RECORDER_GATHER 19

// As `gather`, inputs of different sizes.
#define RCOMM_RECORDER_GATHER_V 20

// Rank i ends with the root's i-th tensor.
#define RCOMM_RECORDER_SCATTER 21

// As `scatter`, parts of different sizes.
#define RCOMM_RECORDER_SCATTER_V 22

// A message to one rank.
#define RCOMM_RECORDER_SEND 23

// A message from one rank, or from any.
#define RCOMM_RECORDER_RECV 24

// The closing marker of a coalesced block.
#define RCOMM_RECORDER_COALESCED 25

// A group was split into sub-groups.
#define RCOMM_RECORDER_SPLIT 26

// A one-sided window was made.
#define RCOMM_RECORDER_NEW_WINDOW 27

// One-sided write into a window.
#define RCOMM_RECORDER_PUT 28

// One-sided read from a window.
#define RCOMM_RECORDER_GET 29

// A signal to a window's other end.
#define RCOMM_RECORDER_SIGNAL 30

// Waiting for a signal.
#define RCOMM_RECORDER_WAIT_SIGNAL 31

// An unknown operation; its own name is in the signature.
#define RCOMM_RECORDER_OTHER 255

// The call succeeded.
#define RCOMM_RECORDER_OK 0

// The call failed; `rcomm_recorder_last_error` returns the reason.
#define RCOMM_RECORDER_FAILED 1

// The number of no row: of a table that is full, and of a call site, peer or root that is not known.
#define RCOMM_RECORDER_NONE UINT32_MAX

// The peer of a receive from any rank.
#define RCOMM_RECORDER_ANY (UINT32_MAX - 1)

// A ring that is open.
typedef struct rcomm_recorder rcomm_recorder;

// An operation that was begun, for what follows. Free to copy, and to pass to other threads.
typedef struct rcomm_recorder_ticket {
  // For the recorder.
  uint64_t words[3];
} rcomm_recorder_ticket;

// The number of a signature.
typedef struct rcomm_recorder_signature_id {
  // For the recorder.
  uint64_t words[3];
} rcomm_recorder_signature_id;

// An operation as it is issued.
typedef struct rcomm_recorder_operation {
  // The number of its group.
  uint32_t group;
  // Where the program called, or `RCOMM_RECORDER_NONE`.
  uint32_t call_site;
  // What it looks like.
  struct rcomm_recorder_signature_id signature;
  // Per group, +1 per collective; messages carry the current value.
  uint64_t collective_seq_id;
  // Per group, +1 per message or batch of them.
  uint64_t p2p_seq_id;
  // Per group, +1 per operation.
  uint64_t op_id;
  // The other end of a message as a rank of the group, `RCOMM_RECORDER_ANY`, or `RCOMM_RECORDER_NONE`.
  uint32_t peer;
  // The root as a rank of the group, or `RCOMM_RECORDER_NONE`.
  uint32_t root;
  // How long it may take, in ms; 0 = not known.
  uint64_t timeout_ms;
  // Elements to each rank of the group; NULL where the operation has none.
  const uint64_t *input_splits;
  // How many there are.
  size_t input_split_count;
  // Elements from each rank of the group; NULL where the operation has none.
  const uint64_t *output_splits;
  // How many there are.
  size_t output_split_count;
  // Its code: one of `RCOMM_RECORDER_ALL_REDUCE` and so on.
  uint8_t op;
  // The code of its reduction, as `RCOMM_SUM` and so on in rcomm.h; 255 = none or not known.
  uint8_t reduction;
  // 1 if it is counted by `p2p_seq_id`.
  uint8_t is_p2p;
  // 1 if it starts as it is issued.
  uint8_t starts_at_once;
} rcomm_recorder_operation;

// Whose ring to open.
typedef struct rcomm_recorder_config {
  // A folder below which the ring is made; NULL = `/dev/shm/rcomm-<uid>`, where the views look, or
  // the process's own memory if no ring can be made there.
  const char *directory;
  // The job's name, at most 255 bytes, equal on all ranks.
  const char *job;
  // This process's rank in the world.
  uint32_t rank;
  // How many ranks the world has.
  uint32_t world_size;
  // How often the job was restarted.
  uint32_t attempt;
  // How many operations the ring holds, rounded up to a power of two; 0 = 16,384.
  uint32_t entries;
} rcomm_recorder_config;

// A group as this process knows it.
typedef struct rcomm_recorder_group_info {
  // Its number in this process, in the order of creation.
  uint32_t id;
  // Its name, equal on all members.
  const char *name;
  // What it is for.
  const char *description;
  // Its members, global ranks in order of group rank; NULL = not known yet.
  const uint32_t *ranks;
  // How many members it has; 0 = not known yet.
  uint32_t size;
  // This process's rank in the group: counts only where `ranks` is NULL and `size` is known.
  uint32_t own_rank;
  // How long its operations may take, in ms; 0 = not known.
  uint64_t timeout_ms;
} rcomm_recorder_group_info;

// A tensor, as far as members can disagree on it.
typedef struct rcomm_recorder_tensor {
  // The code of its elements' type, as `RCOMM_F32` and so on in rcomm.h; 255 = another.
  uint8_t dtype;
  // How many dimensions it has.
  uint32_t dimensions;
  // Its extents; may be NULL if it has no dimensions.
  const uint64_t *shape;
} rcomm_recorder_tensor;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Records that an operation is issued, now, by the calling thread.
//
// # Safety
// `recorder` is NULL or a living handle; `operation` is NULL or points to an operation whose splits are
// NULL or as many as their counts.
struct rcomm_recorder_ticket rcomm_recorder_begin(const struct rcomm_recorder *recorder,
                                                  const struct rcomm_recorder_operation *operation);

// Records that an operation was seen, now, to have started.
//
// # Safety
// `recorder` is NULL or a living handle.
void rcomm_recorder_started(const struct rcomm_recorder *recorder,
                            struct rcomm_recorder_ticket ticket);

// Records that an operation was seen, now, to have completed.
//
// # Safety
// `recorder` is NULL or a living handle.
void rcomm_recorder_completed(const struct rcomm_recorder *recorder,
                              struct rcomm_recorder_ticket ticket);

// Records that an operation was seen, now, to have completed, and how many nanoseconds it ran, as
// measured by the backend.
//
// # Safety
// `recorder` is NULL or a living handle.
void rcomm_recorder_completed_after(const struct rcomm_recorder *recorder,
                                    struct rcomm_recorder_ticket ticket,
                                    uint64_t duration_ns);

// Records that an operation ended, now, with an error or a time-out.
//
// # Safety
// `recorder` is NULL or a living handle.
void rcomm_recorder_failed(const struct rcomm_recorder *recorder,
                           struct rcomm_recorder_ticket ticket);

// Records that an operation is not watched any more: what becomes of it will not be recorded.
//
// # Safety
// `recorder` is NULL or a living handle.
void rcomm_recorder_retired(const struct rcomm_recorder *recorder,
                            struct rcomm_recorder_ticket ticket);

// Why the last call of this thread that failed did so; empty if none did. Valid until the next call of
// this thread fails.
const char *rcomm_recorder_last_error(void);

// Names what the program does from now on, in at most 104 bytes; the empty text ends a phase.
//
// # Safety
// `recorder` is NULL or a living handle; `name` is NULL or a text.
void rcomm_recorder_phase(const struct rcomm_recorder *recorder, const char *name);

// Sets the step that the program is in.
//
// # Safety
// `recorder` is NULL or a living handle.
void rcomm_recorder_step(const struct rcomm_recorder *recorder, int64_t step);

// Updates the heartbeat: to be called about once a second, from a thread that never blocks.
//
// # Safety
// `recorder` is NULL or a living handle.
void rcomm_recorder_heartbeat(const struct rcomm_recorder *recorder);

// Opens the ring of this rank and attempt. Blocks for the milliseconds that it takes to make a file of some
// MiB. A living process that records as the same rank of the same attempt is an error.
//
// # Safety
// `config` points to a configuration whose texts are NULL or end with a zero byte; `recorder` may be
// written.
int32_t rcomm_recorder_open(const struct rcomm_recorder_config *config,
                            struct rcomm_recorder **recorder);

// Closes the ring, removes its file and frees the handle: the rank ended in order. NULL is nothing.
//
// # Safety
// `recorder` is NULL or a living handle that no thread uses any more.
int32_t rcomm_recorder_close(struct rcomm_recorder *recorder);

// Frees the handle and leaves the ring's file for readers, as a rank's that is gone. NULL is nothing.
//
// # Safety
// `recorder` is NULL or a living handle that no thread uses any more.
void rcomm_recorder_leave(struct rcomm_recorder *recorder);

// Writes the path of the ring's file with a zero byte into `buffer`, as far as it fits, and returns the
// bytes that it needs; 0 = the ring is in the process's own memory.
//
// # Safety
// `recorder` is NULL or a living handle; `buffer` may be written for `size` bytes, or `size` is 0.
size_t rcomm_recorder_path(const struct rcomm_recorder *recorder,
                           char *buffer,
                           size_t size);

// Adds a group, and returns its number.
//
// # Safety
// `recorder` is NULL or a living handle; `group` points to a group whose texts are NULL or end with a zero
// byte and whose ranks are NULL or as many as its size.
uint32_t rcomm_recorder_group(const struct rcomm_recorder *recorder,
                              const struct rcomm_recorder_group_info *group);

// Gives a group that was added without them its members, once. Fails if they are known, or not as many as
// the group's size, or if the ring has no room for them.
//
// # Safety
// `recorder` is NULL or a living handle; `ranks` holds `count` ranks.
int32_t rcomm_recorder_group_members(const struct rcomm_recorder *recorder,
                                     uint32_t group,
                                     const uint32_t *ranks,
                                     size_t count);

// The number of a place in the program's source, from line 1.
//
// # Safety
// `recorder` is NULL or a living handle; the texts are NULL or end with a zero byte.
uint32_t rcomm_recorder_call_site(const struct rcomm_recorder *recorder,
                                  const char *file,
                                  const char *function,
                                  uint32_t line);

// The number of what an operation looks like: its backend, its name, and its tensors. Without room in the
// table, operations with it are recorded by their numbers of elements.
//
// # Safety
// `recorder` is NULL or a living handle; the texts are NULL or end with a zero byte; `inputs` and
// `outputs` hold as many tensors as their counts, each with as many extents as it has dimensions.
struct rcomm_recorder_signature_id rcomm_recorder_signature(const struct rcomm_recorder *recorder,
                                                            const char *backend,
                                                            const char *name,
                                                            const struct rcomm_recorder_tensor *inputs,
                                                            size_t input_count,
                                                            const struct rcomm_recorder_tensor *outputs,
                                                            size_t output_count);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RCOMM_RECORDER_H */
