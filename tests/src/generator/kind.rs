//! The kinds of faults that a job can have.

use rcomm_analyzer::Code;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A rank issues nothing more.
    Stuck,
    /// A rank crashes, and leaves no record.
    Crash,
    /// A rank leaves out one collective.
    Skip,
    /// A rank issues one collective that no other rank does.
    Extra,
    /// A rank issues another operation.
    Op,
    /// A rank passes another element type.
    Dtype,
    /// A rank passes another size.
    Size,
    /// A rank issues two consecutive collectives of one group in the other order.
    Swap,
    /// A rank leaves out a message.
    LostMessage,
    /// The sizes of the two halves of a message differ.
    MessageSize,
    /// A rank leaves out one send.
    SendLeftOut,
    /// A rank leaves out one receive.
    ReceiveLeftOut,
    /// A rank posts a batch of several messages without one of them.
    Lopsided,
    /// A rank posts its send before the receive that its peer's send waits for.
    SendFirst,
    /// All ranks post their send before their receive: no rank deviates from the others.
    AllSendFirst,
    /// All ranks of a host crash at nearly the same moment, and leave no record.
    HostDown,
    /// All ranks of two hosts crash at nearly the same moment, and leave no record.
    HostsDown,
    /// A rank passes other members to the creation of a group, so that no collective of the group completes.
    Members,
    /// All ranks enter a collective and none finishes it.
    Fabric,
    /// A rank is late in every step.
    Slow,
    /// All ranks of a host are late in every step (only in records that name hosts).
    SlowHost,
    /// In each step a random rank is late.
    Turns,
    /// A rank issues two consecutive collectives on different groups in the other order.
    Detour,
    /// A rank considers itself the root of a gather.
    Root,
    /// A rank sends other split sizes in an exchange than its peers expect.
    Splits,
    /// The fault of [`Kind::Splits`], in a job that records only the sums of the splits.
    Sum,
    /// A rank's process is gone (only in records that outlive the process).
    Dead,
    /// An operation fails on one rank while all ranks are in it (only in records that show failures).
    Fails,
    /// A rank's watchdog makes no rounds; the job runs on.
    Stalled,
    /// A rank's ring holds less than a step of a program that names its steps.
    ShortRing,
    /// A rank issues nothing more, and the other ranks' hosts issue so far ahead of their devices that the operations
    /// in progress have left the rings.
    Overrun,
    /// A rank's recorder lost records because writers collided.
    Dropped,
    /// A rank moves far more bytes than its peers in exchanges.
    Uneven,
    /// All ranks issue a long row of small operations.
    Tiny,
    /// An operation succeeds shortly before its time-out.
    NearTimeout,
    /// A rank issues two operations of one group, which agree in all but their places in the source, in
    /// the other order.
    Threads,
    /// A rank issues two operations of groups that share ranks in the other order; neither operation waits for the
    /// other.
    Inverted,
    /// Both ends of an exchange post their send before their receive; the sends are buffered.
    BufferedSends,
    /// Two ranks leave no record, and completions are noticed so late that the clocks do not tell which of the two was
    /// missed first.
    Clocks,
}

impl Kind {
    /// Kinds that end in a hang. Further ones are [`Self::MESSAGES`], [`Self::HOSTS`], [`Self::Members`] and
    /// [`Self::Fabric`].
    pub const HANGS: &'static [Self] = &[
        Self::Stuck,
        Self::Crash,
        Self::Skip,
        Self::Extra,
        Self::Op,
        Self::Dtype,
        Self::Size,
        Self::Swap,
        Self::LostMessage,
        Self::MessageSize,
        Self::Detour,
        Self::Root,
        Self::Splits,
        Self::Sum,
        Self::Dead,
        Self::Fails,
    ];

    /// Kinds in which the halves of messages do not match, or are posted in the wrong order.
    pub const MESSAGES: &'static [Self] = &[
        Self::SendLeftOut,
        Self::ReceiveLeftOut,
        Self::MessageSize,
        Self::Lopsided,
        Self::SendFirst,
        Self::AllSendFirst,
    ];

    /// Kinds in which all ranks of a host crash.
    pub const HOSTS: &'static [Self] = &[Self::HostDown, Self::HostsDown];

    /// Kinds that are reported by a warning, or that do not stop the job. Further ones are [`Self::Slow`] and
    /// [`Self::Turns`].
    pub const WARNINGS: &'static [Self] = &[
        Self::Stalled,
        Self::ShortRing,
        Self::Dropped,
        Self::SlowHost,
        Self::Uneven,
        Self::Tiny,
        Self::NearTimeout,
        Self::Overrun,
        Self::Clocks,
        Self::Threads,
        Self::Inverted,
        Self::BufferedSends,
    ];

    /// The codes of findings that report the fault, with the codes that the same dumps support equally well.
    pub fn codes(self) -> &'static [Code] {
        use Code::*;
        match self {
            Self::Stuck => &[E101, E120],
            Self::Crash => &[E102],
            // Between two uneven exchanges, a call that is left out or added shows only by splits, or sums of splits,
            // that differ from the peers' ones.
            Self::Skip | Self::Extra => &[E103, E104, E110, E111, E112, E113, E114, E101, E130],
            Self::Op => &[E110, E103, E104],
            Self::Dtype => &[E111],
            Self::Size => &[E112],
            Self::Swap => &[E113, E110, E112, E103, E104],
            Self::LostMessage => &[E120, E121, E130, E103],
            // The operation in which a rank waits does not always show which message was left out.
            Self::SendLeftOut | Self::ReceiveLeftOut | Self::Lopsided => &[E120, E130, E103],
            Self::SendFirst | Self::AllSendFirst => &[E120],
            Self::HostDown | Self::HostsDown => &[E102],
            Self::MessageSize => &[E121],
            Self::Members => &[E105],
            Self::Fabric => &[E135],
            Self::Slow | Self::SlowHost => &[W220],
            Self::Turns => &[N306],
            Self::Detour => &[E130, E113, E101, E120, E103],
            Self::Root | Self::Splits => &[E114],
            Self::Sum => &[E112],
            Self::Dead | Self::Fails => &[E150],
            Self::Stalled => &[E140],
            Self::ShortRing | Self::Overrun | Self::Dropped => &[W160],
            Self::Uneven => &[W230],
            Self::Tiny => &[W240],
            Self::NearTimeout => &[W250],
            Self::Clocks => &[W260],
            Self::Threads => &[W270],
            Self::Inverted => &[W280],
            Self::BufferedSends => &[W290],
        }
    }
}
