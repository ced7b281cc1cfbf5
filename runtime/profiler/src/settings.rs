//! The plug-in's settings from the environment.

use crate::abi::event;
use rcomm_recorder::launch::Launched;
use rcomm_recorder::record::{Placement, RecorderConfig, RingPart};

/// The events to record, and the size of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Events {
    /// Bits of [`event`]; 0 = no events.
    pub(crate) mask: u64,
    /// The number of operations that the ring holds.
    pub(crate) depth: u32,
    /// Whether more is recorded for some time after a hang or a stall. It is, unless the user has named events.
    pub(crate) deepens: bool,
}

/// The events of `calls`.
const CALLS: u64 = event::COLL | event::P2P | event::GROUP_API | event::COLL_API | event::P2P_API;
/// The words of `RCOMM_NCCL_EVENTS`, and the events that each word requests.
const WORDS: [(&str, u64); 5] = [
    ("none", 0),
    ("calls", CALLS),
    ("channels", CHANNELS),
    ("network", CHANNELS | event::PROXY_OP),
    ("steps", CHANNELS | event::PROXY_OP | event::PROXY_STEP),
];
/// The events of `channels`. The words for transfers include these events, because a transfer is recorded with its
/// operation, and only the events of channels report when an operation has ended.
const CHANNELS: u64 = CALLS | event::KERNEL_CH;
const DEFAULT: Events = Events {
    mask: CHANNELS | event::PROXY_OP,
    depth: 16_384,
    deepens: true,
};

impl Events {
    /// These events for a version of NCCL that does not report calls: if there are any, those of channels are among
    /// them. Such a version reports an operation with its plan, also each time a graph is replayed. Without events of
    /// channels, it would report a replay only on ranks where the graph uses the network, so that the ranks would
    /// number their operations differently.
    pub(crate) fn without_calls(self) -> Self {
        let mask = match self.mask {
            0 => 0,
            mask => mask | event::KERNEL_CH,
        };
        Self { mask, ..self }
    }

    /// Parses `RCOMM_NCCL_EVENTS`: words and a number, separated by commas. The error is a complete
    /// sentence.
    pub(crate) fn parse(text: Option<&str>) -> Result<Self, String> {
        let mut events = DEFAULT;
        let mut mask = None;
        let parts = text.unwrap_or_default().split(',').map(str::trim);
        for part in parts.filter(|part| !part.is_empty()) {
            if let Some((_, bits)) = WORDS.iter().find(|(word, _)| *word == part) {
                mask = Some(mask.unwrap_or(0) | bits);
            } else if let Ok(depth) = part.parse::<u32>()
                && (64..=1 << 20).contains(&depth)
            {
                events.depth = depth;
            } else {
                return Err(format!(
                    "RCOMM_NCCL_EVENTS has {part:?}; expected are calls, channels, network, steps or none, and the \
                     number of operations that the ring holds, 64 to 1048576"
                ));
            }
        }
        events.deepens = mask.is_none();
        events.mask = mask.unwrap_or(events.mask);
        Ok(events)
    }
}

/// The identity of the process within a communicator. If no launcher gives an identity, the process has that in its
/// largest communicator so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommunicatorIdentity {
    pub(crate) hash: u64,
    pub(crate) rank: u32,
    pub(crate) size: u32,
}

impl CommunicatorIdentity {
    /// The name of the job that the communicator's ranks form if there is no launcher.
    pub(crate) fn job(&self) -> String {
        format!("nccl-{:016x}", self.hash)
    }
}

/// What gives a process its rank and its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdentitySource {
    /// The launcher's variables.
    Launcher,
    /// The largest communicator so far.
    Communicator,
}

/// Returns the configuration of this process's ring, and what gives the process its rank and job.
///
/// # Errors
/// A sentence, if neither a launcher nor a communicator gives a rank.
pub(crate) fn ring_config(
    lookup: impl Fn(&str) -> Option<String>,
    events: Events,
    first: Option<CommunicatorIdentity>,
) -> Result<(RecorderConfig, IdentitySource), String> {
    let launched = Launched::from_environment(&lookup);
    let source = match launched {
        Some(_) => IdentitySource::Launcher,
        None => IdentitySource::Communicator,
    };
    let (rank, world_size, job, attempt) = match (launched, first) {
        (Some(launched), _) => (
            launched.rank,
            launched.world_size,
            launched.job.unwrap_or_else(|| "nccl".to_owned()),
            launched.attempt,
        ),
        (None, Some(first)) => (first.rank, first.size, first.job(), 0),
        (None, None) => {
            return Err(
                "no launcher gave this process a rank, and this version of NCCL does not either: \
                        set RANK and WORLD_SIZE"
                    .to_owned(),
            );
        }
    };
    let job = cut(job);
    let config = RecorderConfig {
        placement: match lookup("RCOMM_RING_DIR").filter(|dir| !dir.is_empty()) {
            None => Placement::Shared,
            Some(dir) if dir == "memory" => Placement::Memory,
            Some(dir) => Placement::Dir(dir.into()),
        },
        attempt,
        entries: events.depth,
        groups: 4_096,
        call_sites: 1,
        links: if events.mask == 0 { 0 } else { 4_096 },
        part: RingPart::NcclProfiler,
        ..RecorderConfig::new(job, rank, world_size)
    };
    Ok((config, source))
}

/// Cuts a job's name to the largest length of a name, 255 bytes.
fn cut(mut job: String) -> String {
    let mut end = job.len().min(255);
    while !job.is_char_boundary(end) {
        end -= 1;
    }
    job.truncate(end);
    job
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_parsed_from_words_and_a_ring_size() {
        assert_eq!(Events::parse(None), Ok(DEFAULT));
        let calls = Events::parse(Some("calls, 1024")).expect("valid events");
        assert_eq!((calls.mask, calls.depth), (CALLS, 1_024));
        assert!(!calls.deepens);
        let default = Events::parse(Some("1024")).expect("valid events");
        assert!(default.deepens && default.mask == DEFAULT.mask);
        let both = Events::parse(Some("channels,steps")).expect("valid events");
        assert_eq!(both.mask & event::PROXY_STEP, event::PROXY_STEP);
        assert_eq!(both.mask & event::KERNEL_CH, event::KERNEL_CH);
        for word in ["network", "steps"] {
            let events = Events::parse(Some(word)).expect("valid events");
            assert_ne!(events.mask & event::KERNEL_CH, 0, "{word}");
        }
        assert_eq!(Events::parse(Some("none")).map(|events| events.mask), Ok(0));
        let none = Events::parse(Some("none")).expect("valid events");
        assert_eq!(none.without_calls(), none);
        assert_ne!(calls.without_calls().mask & event::KERNEL_CH, 0);
        assert!(Events::parse(Some("kernels")).is_err());
        assert!(Events::parse(Some("calls,63")).is_err());
    }

    #[test]
    fn a_process_without_a_launcher_is_identified_by_its_first_communicator() {
        let first = CommunicatorIdentity {
            hash: 0xab,
            rank: 1,
            size: 2,
        };
        let (config, source) = ring_config(|_| None, DEFAULT, Some(first)).expect("a rank");
        assert_eq!((config.rank, config.world_size), (1, 2));
        assert_eq!(source, IdentitySource::Communicator);
        assert_eq!(config.job, "nccl-00000000000000ab");
        assert!(ring_config(|_| None, DEFAULT, None).is_err());
    }
}
