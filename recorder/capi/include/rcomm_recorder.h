/*
 * rcomm's flight recorder: writes the operations of one rank into a ring that outlives its process.
 *
 * Generated from recorder/capi/src and the table of operations; a test compares the two.
 *
 * Any thread may call any function at any time, except rcomm_recorder_close and rcomm_recorder_leave,
 * which end the handle. The functions that record (begin, started, completed, failed, retired, phase,
 * step, heartbeat) never fail; they neither block nor allocate, except that the first begin of a thread
 * adds the thread to a table. Adding to a table (also group, members, call_site, signature) takes a lock
 * for the time of a copy: call these functions once and keep the number. Operations of one group are
 * begun in the order of issue.
 *
 * In a child made by fork, functions called with the parent's handle do nothing. To record, the child
 * opens a ring of its own.
 *
 * Texts are UTF-8 and end with a zero byte; NULL is the empty text. Memory that arguments point to is copied
 * before the call returns. If a table is full, the returned number is RCOMM_RECORDER_NONE, which other
 * functions accept.
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

// A barrier in which rank 0 of the group reports the ranks that did not arrive.
#define RCOMM_RECORDER_MONITORED_BARRIER 7

// Every rank ends with a list of all inputs.
#define RCOMM_RECORDER_ALL_GATHER 8

// Every rank ends with all inputs in one tensor.
#define RCOMM_RECORDER_ALL_GATHER_SINGLE 9

// Like `all_gather`, with inputs of different sizes.
#define RCOMM_RECORDER_ALL_GATHER_V 10

// Several tensors gathered as one operation.
#define RCOMM_RECORDER_ALL_GATHER_COALESCED 11

// Rank i ends with the reduction of all ranks' i-th inputs.
#define RCOMM_RECORDER_REDUCE_SCATTER 12

// Like `reduce_scatter`, from one tensor.
#define RCOMM_RECORDER_REDUCE_SCATTER_SINGLE 13

// Like `reduce_scatter`, with parts of different sizes.
#define RCOMM_RECORDER_REDUCE_SCATTER_V 14

// Several tensors reduced and scattered as one operation.
#define RCOMM_RECORDER_REDUCE_SCATTER_COALESCED 15

// Every rank sends its i-th tensor to rank i.
#define RCOMM_RECORDER_ALL_TO_ALL 16

// Like `all_to_all`, within one tensor of even parts.
#define RCOMM_RECORDER_ALL_TO_ALL_SINGLE 17

// Like `all_to_all`, within one tensor of parts of any size.
#define RCOMM_RECORDER_ALL_TO_ALL_V_SINGLE 18

// The root ends with a list of all inputs.
#define RCOMM_RECORDER_GATHER 19

// Like `gather`, with inputs of different sizes.
#define RCOMM_RECORDER_GATHER_V 20

// Rank i ends with the root's i-th tensor.
#define RCOMM_RECORDER_SCATTER 21

// Like `scatter`, with parts of different sizes.
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

// A signal to another rank of a window.
#define RCOMM_RECORDER_SIGNAL 30

// Waiting for a signal.
#define RCOMM_RECORDER_WAIT_SIGNAL 31

// An unknown operation; its own name is in the signature.
#define RCOMM_RECORDER_OTHER 255

// The call succeeded.
#define RCOMM_RECORDER_OK 0

// The call failed; `rcomm_recorder_last_error` returns the reason.
#define RCOMM_RECORDER_FAILED 1

// A missing number: of a group or call site that did not fit in its table, or an unknown call site, peer or
// root.
#define RCOMM_RECORDER_NONE UINT32_MAX

// The peer of a receive from any rank.
#define RCOMM_RECORDER_ANY (UINT32_MAX - 1)

// An open ring.
typedef struct rcomm_recorder rcomm_recorder;

// Refers to an operation that was begun, for later calls. Free to copy, and to pass to other threads.
typedef struct rcomm_recorder_ticket {
  // For the recorder's use only.
  uint64_t words[3];
} rcomm_recorder_ticket;

// Identifies a signature.
typedef struct rcomm_recorder_signature_id {
  // For the recorder's use only.
  uint64_t words[3];
} rcomm_recorder_signature_id;

// An operation as it is issued.
typedef struct rcomm_recorder_operation {
  // The number of the operation's group.
  uint32_t group;
  // Number of the call site, or `RCOMM_RECORDER_NONE`.
  uint32_t call_site;
  // The operation's signature.
  struct rcomm_recorder_signature_id signature;
  // Per group, +1 per collective; point-to-point operations carry the current value.
  uint64_t collective_seq_id;
  // Per group, +1 per point-to-point operation or batch.
  uint64_t p2p_seq_id;
  // Per group, +1 per logical operation.
  uint64_t op_id;
  // The peer of a send or receive, as a rank of the group, `RCOMM_RECORDER_ANY`, or `RCOMM_RECORDER_NONE`.
  uint32_t peer;
  // The root as a rank of the group, or `RCOMM_RECORDER_NONE`.
  uint32_t root;
  // The operation's time-out in ms; 0 = unknown.
  uint64_t timeout_ms;
  // Elements sent to each rank of the group; NULL if the operation has no splits.
  const uint64_t *input_splits;
  // Number of input splits.
  size_t input_split_count;
  // Elements received from each rank of the group; NULL if the operation has no splits.
  const uint64_t *output_splits;
  // Number of output splits.
  size_t output_split_count;
  // The operation's code: one of `RCOMM_RECORDER_ALL_REDUCE` and so on.
  uint8_t op;
  // The code of the operation's reduction, as `RCOMM_SUM` and so on in rcomm.h; 255 = none or unknown.
  uint8_t reduction;
  // 1 if the operation is counted by `p2p_seq_id`, otherwise 0.
  uint8_t is_p2p;
  // 1 if the operation starts when it is issued, otherwise 0.
  uint8_t starts_at_once;
} rcomm_recorder_operation;

// The configuration of a ring.
typedef struct rcomm_recorder_config {
  // Folder below which the ring is created; NULL = `/dev/shm/rcomm-<uid>`, where the views look for it, or the
  // process's own memory if no ring can be created there.
  const char *directory;
  // Name of the job, at most 255 bytes, equal on all ranks.
  const char *job;
  // This process's rank in the world.
  uint32_t rank;
  // Number of ranks in the world.
  uint32_t world_size;
  // Number of times that the job was restarted.
  uint32_t attempt;
  // Capacity of the ring in operations, rounded up to a power of two; 0 = 16,384.
  uint32_t entries;
} rcomm_recorder_config;

// A group, as known to this process.
typedef struct rcomm_recorder_group_info {
  // The group's number in this process, in the order of creation.
  uint32_t id;
  // The group's name, equal on all members.
  const char *name;
  // The group's purpose.
  const char *description;
  // Global ranks of the group's members in order of group rank; NULL = not known yet.
  const uint32_t *ranks;
  // Number of the group's members; 0 = not known yet.
  uint32_t size;
  // This process's rank in the group; used only if `ranks` is NULL and `size` is known.
  uint32_t own_rank;
  // Time-out of the group's operations in ms; 0 = unknown.
  uint64_t timeout_ms;
} rcomm_recorder_group_info;

// The properties of a tensor on which members can disagree.
typedef struct rcomm_recorder_tensor {
  // The code of the element type, as `RCOMM_F32` and so on in rcomm.h; 255 = another type.
  uint8_t dtype;
  // Number of dimensions.
  uint32_t dimensions;
  // Sizes of the dimensions; may be NULL if there are none.
  const uint64_t *shape;
} rcomm_recorder_tensor;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Records that the calling thread issues an operation now. Returns its ticket; if it was not recorded, one that later
// calls ignore.
//
// # Safety
// `recorder` is NULL or a valid handle; `operation` is NULL or points to an operation whose splits are
// NULL or as many as their counts.
struct rcomm_recorder_ticket rcomm_recorder_begin(const struct rcomm_recorder *recorder,
                                                  const struct rcomm_recorder_operation *operation);

// Records that an operation was seen to have started, now.
//
// # Safety
// `recorder` is NULL or a valid handle.
void rcomm_recorder_started(const struct rcomm_recorder *recorder,
                            struct rcomm_recorder_ticket ticket);

// Records that an operation was seen to have completed, now.
//
// # Safety
// `recorder` is NULL or a valid handle.
void rcomm_recorder_completed(const struct rcomm_recorder *recorder,
                              struct rcomm_recorder_ticket ticket);

// Records that an operation was seen to have completed, now, and its run time in nanoseconds, as measured by the
// backend.
//
// # Safety
// `recorder` is NULL or a valid handle.
void rcomm_recorder_completed_after(const struct rcomm_recorder *recorder,
                                    struct rcomm_recorder_ticket ticket,
                                    uint64_t duration_ns);

// Records that an operation ended with an error or a time-out, now.
//
// # Safety
// `recorder` is NULL or a valid handle.
void rcomm_recorder_failed(const struct rcomm_recorder *recorder,
                           struct rcomm_recorder_ticket ticket);

// Records that an operation is no longer watched: its further progress will not be recorded.
//
// # Safety
// `recorder` is NULL or a valid handle.
void rcomm_recorder_retired(const struct rcomm_recorder *recorder,
                            struct rcomm_recorder_ticket ticket);

// The text of the last error of this thread; empty if no call of this thread has failed. Valid until the next call of
// this thread fails.
const char *rcomm_recorder_last_error(void);

// Names the program's phase from now on; at most 104 bytes of the name are kept. An empty text ends a phase.
//
// # Safety
// `recorder` is NULL or a valid handle; `name` is NULL or a text.
void rcomm_recorder_phase(const struct rcomm_recorder *recorder,
                          const char *name);

// Sets the program's step from now on.
//
// # Safety
// `recorder` is NULL or a valid handle.
void rcomm_recorder_step(const struct rcomm_recorder *recorder, int64_t step);

// Updates the heartbeat. Call it about once a second, from a thread that never blocks.
//
// # Safety
// `recorder` is NULL or a valid handle.
void rcomm_recorder_heartbeat(const struct rcomm_recorder *recorder);

// Opens the ring of this rank and attempt, and removes the rings of dead jobs from its directory, except the newest
// (32 jobs, 1 GiB). Blocks for a few milliseconds while it creates a file of a few MiB. Fails if another living
// process records as the same rank of the same attempt, if the configuration is not valid, if no ring can be created
// in `directory`, and on Linux before 4.14.
//
// # Safety
// `config` points to a configuration whose texts are NULL or end with a zero byte; `recorder` may be
// written.
int32_t rcomm_recorder_open(const struct rcomm_recorder_config *config,
                            struct rcomm_recorder **recorder);

// Closes the ring, removes the rings that earlier attempts left, and frees the handle: for a rank that ends cleanly.
// Once all rings of the job on this host are closed, the last rank removes their files. NULL has no effect. Fails if
// a file cannot be removed; the handle is freed even then.
//
// # Safety
// `recorder` is NULL or a valid handle that no thread uses any more.
int32_t rcomm_recorder_close(struct rcomm_recorder *recorder);

// Frees the handle and leaves the ring's file for readers, which treat the rank as ended without closing its ring.
// NULL has no effect.
//
// # Safety
// `recorder` is NULL or a valid handle that no thread uses any more.
void rcomm_recorder_leave(struct rcomm_recorder *recorder);

// Writes the path of the ring's file with a terminating zero byte into `buffer`, truncated to its size. Returns the
// size that it needs in bytes; 0 if the ring is in the process's own memory, and if the call does nothing.
//
// # Safety
// `recorder` is NULL or a valid handle; `buffer` may be written for `size` bytes, or `size` is 0.
size_t rcomm_recorder_path(const struct rcomm_recorder *recorder,
                           char *buffer,
                           size_t size);

// Adds a group. Returns its number; `RCOMM_RECORDER_NONE` if it was not added.
//
// # Safety
// `recorder` is NULL or a valid handle; `group` points to a group whose texts are NULL or end with a zero
// byte and whose ranks are NULL or as many as its size.
uint32_t rcomm_recorder_group(const struct rcomm_recorder *recorder,
                              const struct rcomm_recorder_group_info *group);

// Sets the members of a group that was added without them, once. Fails if the ring has no such group, if the members
// are already set, if their number is 0 or differs from the group's size, or if the ring has no space for them.
//
// # Safety
// `recorder` is NULL or a valid handle; `ranks` holds `count` ranks.
int32_t rcomm_recorder_group_members(const struct rcomm_recorder *recorder,
                                     uint32_t group,
                                     const uint32_t *ranks,
                                     size_t count);

// Returns the number of a call site: a location in the program's source; lines count from 1. `RCOMM_RECORDER_NONE` if
// it does not fit in its table.
//
// # Safety
// `recorder` is NULL or a valid handle; the texts are NULL or end with a zero byte.
uint32_t rcomm_recorder_call_site(const struct rcomm_recorder *recorder,
                                  const char *file,
                                  const char *function,
                                  uint32_t line);

// Returns the id of an operation's signature: its backend, its name, and its tensors. If it does not fit in its table,
// operations with it are recorded with their numbers of elements only.
//
// # Safety
// `recorder` is NULL or a valid handle; the texts are NULL or end with a zero byte; `inputs` and
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
