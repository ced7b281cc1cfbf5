//! The keys of the dialect, defined once for readers and writers.
//!
//! Unmarked keys are PyTorch's. Keys marked "ours" are extensions in rcomm's dumps; PyTorch's tools ignore
//! unknown keys.

/// Keys of the whole dump.
pub(super) mod top {
    pub(in super::super) const VERSION: &str = "version";
    pub(in super::super) const PG_CONFIG: &str = "pg_config";
    pub(in super::super) const PG_STATUS: &str = "pg_status";
    pub(in super::super) const COMM_LIB_VERSION: &str = "comm_lib_version";
    /// The name of `comm_lib_version` in versions 2.6 and 2.7.
    pub(in super::super) const NCCL_VERSION: &str = "nccl_version";
    pub(in super::super) const ENTRIES: &str = "entries";
    pub(in super::super) const NCCL_COMM_STATE: &str = "nccl_comm_state";
    // Ours.
    pub(in super::super) const RECORDER: &str = "recorder";
    pub(in super::super) const RANK: &str = "rank";
    pub(in super::super) const WORLD_SIZE: &str = "world_size";
    pub(in super::super) const HOST: &str = "host";
    pub(in super::super) const JOB: &str = "job";
    pub(in super::super) const ATTEMPT: &str = "attempt";
    pub(in super::super) const PID: &str = "pid";
    pub(in super::super) const DUMP_TIME: &str = "dump_time_ns";
    pub(in super::super) const BEGUN: &str = "begun_ns";
    pub(in super::super) const REASON: &str = "reason";
    pub(in super::super) const STATUS: &str = "status";
    pub(in super::super) const FRAMES: &str = "frames";
    pub(in super::super) const STACKS: &str = "stacks";
    pub(in super::super) const FAILURES: &str = "failures";
    pub(in super::super) const CLOSED: &str = "closed_ns";
    pub(in super::super) const PEERS: &str = "peers";
    pub(in super::super) const PROCESSOR_WAIT_SINCE: &str = "processor_wait_since_ns";
    pub(in super::super) const PROCESSOR_WAIT: &str = "processor_wait_ns";
    pub(in super::super) const REDUCER_STEPS: &str = "reducer_steps";
}

/// Keys of a step of a reducer, and of its buckets (ours).
pub(super) mod reducer {
    pub(in super::super) const ID: &str = "id";
    pub(in super::super) const GROUP: &str = "group";
    pub(in super::super) const ENDED: &str = "ended_ns";
    pub(in super::super) const STEP: &str = "step";
    pub(in super::super) const FORWARD: &str = "forward_ns";
    pub(in super::super) const BACKWARD: &str = "backward_ns";
    pub(in super::super) const COMMUNICATION: &str = "communication_ns";
    pub(in super::super) const EXPOSED: &str = "exposed_ns";
    pub(in super::super) const BYTES: &str = "bytes";
    pub(in super::super) const BUCKET_COUNT: &str = "bucket_count";
    pub(in super::super) const SUM_STEPS: &str = "sum_steps";
    pub(in super::super) const SUM_FORWARD: &str = "sum_forward_ns";
    pub(in super::super) const SUM_BACKWARD: &str = "sum_backward_ns";
    pub(in super::super) const SUM_COMMUNICATION: &str = "sum_communication_ns";
    pub(in super::super) const SUM_EXPOSED: &str = "sum_exposed_ns";
    pub(in super::super) const BUCKETS: &str = "buckets";
    pub(in super::super) const INDEX: &str = "index";
    pub(in super::super) const PARAMETERS: &str = "parameters";
    pub(in super::super) const READY: &str = "ready_ns";
    pub(in super::super) const SENT: &str = "sent_ns";
}

/// Keys of the connections to one other end (ours).
pub(super) mod peer {
    pub(in super::super) const RANK: &str = "rank";
    pub(in super::super) const STORE: &str = "store";
    pub(in super::super) const HEARD: &str = "heard_ns";
    pub(in super::super) const SAMPLED: &str = "sampled_ns";
    pub(in super::super) const WAITED_SINCE: &str = "waited_since_ns";
    pub(in super::super) const GROUP: &str = "group";
    pub(in super::super) const SEQ: &str = "seq";
    pub(in super::super) const IS_P2P: &str = "is_p2p";
    pub(in super::super) const RECEIVED: &str = "received";
    pub(in super::super) const SENT: &str = "sent";
    pub(in super::super) const UNACKNOWLEDGED: &str = "unacknowledged";
    pub(in super::super) const ERRNO: &str = "errno";
    pub(in super::super) const INTERVAL: &str = "interval_ms";
}

/// Keys of a failure (ours).
pub(super) mod failure {
    pub(in super::super) const ID: &str = "id";
    pub(in super::super) const KIND: &str = "kind";
    pub(in super::super) const RANKS: &str = "ranks";
    pub(in super::super) const RANK_COUNT: &str = "rank_count";
    pub(in super::super) const GROUP: &str = "group";
    pub(in super::super) const OPERATION: &str = "operation";
    pub(in super::super) const OP: &str = "op";
    pub(in super::super) const SEQ: &str = "seq";
    pub(in super::super) const IS_P2P: &str = "is_p2p";
    pub(in super::super) const RECORD_ID: &str = "record_id";
    pub(in super::super) const TIME: &str = "time_ns";
    pub(in super::super) const SEEN_BY: &str = "seen_by";
    pub(in super::super) const TEXT: &str = "text";
}

/// Keys of one group in `pg_config`.
pub(super) mod config {
    pub(in super::super) const NAME: &str = "name";
    pub(in super::super) const DESC: &str = "desc";
    pub(in super::super) const RANKS: &str = "ranks";
    /// Ours: the group's local number, which a reader of PyTorch's dumps has to infer from the entries.
    pub(in super::super) const PG_ID: &str = "pg_id";
    /// Ours: the rank's number in a group whose members the record does not contain.
    pub(in super::super) const GROUP_RANK: &str = "group_rank";
    /// Ours: the number of members of a group whose members the record does not contain.
    pub(in super::super) const GROUP_SIZE: &str = "group_size";
}

/// Keys of one group in `pg_status`.
pub(super) mod status {
    pub(in super::super) const ENQUEUED: &str = "last_enqueued_collective";
    pub(in super::super) const STARTED: &str = "last_started_collective";
    pub(in super::super) const COMPLETED: &str = "last_completed_collective";
    /// Ours: the group's current time-out.
    pub(in super::super) const TIMEOUT: &str = "timeout_ms";
}

/// Keys of the rank's own status (ours).
pub(super) mod rank {
    pub(in super::super) const PHASE: &str = "phase";
    pub(in super::super) const PHASE_SINCE: &str = "phase_since_ns";
    pub(in super::super) const STEP: &str = "step";
    pub(in super::super) const HEARTBEAT: &str = "heartbeat_ns";
    pub(in super::super) const DROPPED: &str = "dropped";
    pub(in super::super) const EXIT_CODE: &str = "exit_code";
    pub(in super::super) const EXITED: &str = "exited_ns";
}

/// Keys of a frame.
pub(super) mod frame {
    pub(in super::super) const NAME: &str = "name";
    pub(in super::super) const FILENAME: &str = "filename";
    pub(in super::super) const LINE: &str = "line";
}

macro_rules! fields {
    ($( $(#[$meta:meta])* $name:ident $key:literal; )+) => {
        /// A key of an entry.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Field {
            $( $(#[$meta])* $name, )+
            /// A key that the reader does not use.
            Unknown,
        }

        impl Field {
            pub(super) fn from_key(key: &[u8]) -> Self {
                $( if key == $key.as_bytes() { return Self::$name; } )+
                Self::Unknown
            }

            pub(super) const fn key(self) -> &'static str {
                match self {
                    $( Self::$name => $key, )+
                    Self::Unknown => "",
                }
            }
        }
    };
}

fields! {
    CollectiveSeqId "collective_seq_id";
    Duration "duration_ms";
    Frames "frames";
    InputDtypes "input_dtypes";
    InputSizes "input_sizes";
    IsP2p "is_p2p";
    OpId "op_id";
    OutputDtypes "output_dtypes";
    OutputSizes "output_sizes";
    P2pSeqId "p2p_seq_id";
    PgId "pg_id";
    ProcessGroup "process_group";
    ProfilingName "profiling_name";
    RecordId "record_id";
    Retired "retired";
    State "state";
    ThreadId "thread_id";
    ThreadName "thread_name";
    TimeCompleted "time_discovered_completed_ns";
    TimeCreated "time_created_ns";
    TimeStarted "time_discovered_started_ns";
    Timeout "timeout_ms";
    /// The one sequence number of version 1, over collectives and messages.
    SeqId "seq_id";
    /// Ours: the operation's own name, if PyTorch's tools need a different one.
    OpName "op_name";
    /// Ours: the backend, if PyTorch's tools do not know its name.
    Backend "backend";
    /// Ours: the other end of a send or receive.
    Peer "peer";
    /// Ours: the root of a rooted operation, as a rank of the group.
    Root "root";
    /// Ours: the reduction of an operation that reduces.
    ReduceOp "reduce_op";
    /// Ours: elements to each rank.
    InputSplits "input_split_sizes";
    /// Ours: elements from each rank.
    OutputSplits "output_split_sizes";
    /// Ours: index into the table of stacks.
    Stack "stack";
    /// Ours: whether the operation ended with an error.
    Failed "failed";
    /// Ours: the CUDA graph that captured the operation.
    GraphId "graph_id";
}
