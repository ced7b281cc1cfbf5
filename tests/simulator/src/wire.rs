//! The protocol between communicators and their hub: fixed heads, then bytes.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// What a rank asks of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RequestKind {
    Join = 0,
    AllReduce = 1,
    Reduce = 2,
    Broadcast = 3,
    AllGather = 4,
    ReduceScatter = 5,
    AllToAll = 6,
    Send = 7,
    Recv = 8,
    Leave = 9,
    Split = 10,
    Shrink = 11,
    Gather = 12,
    Scatter = 13,
    /// All ranks receive the bytes of all ranks.
    Exchange = 14,
    /// The rank has stopped its kernels: it has aborted or revoked the communicator, or shrinks it with
    /// `NCCL_SHRINK_ABORT`.
    Stop = 15,
}

impl RequestKind {
    /// Whether the library makes the operation of sends and receives (`taskAppend`, enqueue.cc:3014).
    pub(crate) fn is_made_of_messages(self) -> bool {
        use RequestKind::{AllToAll, Gather, Recv, Scatter, Send};
        matches!(self, Send | Recv | AllToAll | Gather | Scatter)
    }

    const ALL: [Self; 16] = [
        Self::Join,
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Send,
        Self::Recv,
        Self::Leave,
        Self::Split,
        Self::Shrink,
        Self::Gather,
        Self::Scatter,
        Self::Exchange,
        Self::Stop,
    ];
}

/// The head of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) kind: RequestKind,
    /// The reply has the same number.
    pub(crate) id: u64,
    /// Number of the collective in the communicator, or of the split, shrink or exchange; the communicator's
    /// key when a rank joins.
    pub(crate) seq: u64,
    /// Root or peer; the sender's own rank when it joins; the color of a split.
    pub(crate) rank: i32,
    /// `ncclDataType_t`; the device when a rank joins.
    pub(crate) data_type: i32,
    /// `ncclRedOp_t`; the number of ranks when a rank joins; the key of a split.
    pub(crate) op: i32,
    /// The rank's factor; 1 unless the reduction was made with one.
    pub(crate) factor: f64,
    /// Bytes of a message, or of each input of a collective.
    pub(crate) length: u64,
}

/// Bytes of a request's head.
const HEAD: usize = 1 + 8 + 8 + 4 + 4 + 4 + 8 + 8 + 8;

impl Request {
    pub(crate) fn new(kind: RequestKind, id: u64, seq: u64) -> Self {
        Self {
            kind,
            id,
            seq,
            rank: 0,
            data_type: 0,
            op: 0,
            factor: 1.0,
            length: 0,
        }
    }

    pub(crate) fn send(&self, to: &mut UnixStream, payload: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEAD + payload.len());
        bytes.push(self.kind as u8);
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.seq.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.data_type.to_le_bytes());
        bytes.extend(self.op.to_le_bytes());
        bytes.extend(self.factor.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend((payload.len() as u64).to_le_bytes());
        bytes.extend(payload);
        to.write_all(&bytes)
    }

    pub(crate) fn receive(from: &mut UnixStream) -> io::Result<(Self, Vec<u8>)> {
        let mut head = [0; HEAD];
        from.read_exact(&mut head)?;
        let kind = RequestKind::ALL
            .get(usize::from(head[0]))
            .ok_or(io::ErrorKind::InvalidData)?;
        let word =
            |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let int = |at: usize| i32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let request = Self {
            kind: *kind,
            id: word(1),
            seq: word(9),
            rank: int(17),
            data_type: int(21),
            op: int(25),
            factor: f64::from_bits(word(29)),
            length: word(37),
        };
        let mut payload =
            vec![0; usize::try_from(word(45)).map_err(|_| io::ErrorKind::InvalidData)?];
        from.read_exact(&mut payload)?;
        Ok((request, payload))
    }
}

/// The hub's answer to a request, or its report that the communicator has failed.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) id: u64,
    /// `ncclResult_t`.
    pub(crate) status: i32,
    /// Result, or the text of an error.
    pub(crate) payload: Vec<u8>,
}

/// The id of an unsolicited reply: the whole communicator has failed.
pub(crate) const FAILED: u64 = u64::MAX;

impl Reply {
    pub(crate) fn send(&self, to: &mut UnixStream) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(20 + self.payload.len());
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.status.to_le_bytes());
        bytes.extend((self.payload.len() as u64).to_le_bytes());
        bytes.extend(&self.payload);
        to.write_all(&bytes)
    }

    pub(crate) fn receive(from: &mut UnixStream) -> io::Result<Self> {
        let mut head = [0; 20];
        from.read_exact(&mut head)?;
        let word =
            |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let status = i32::from_le_bytes(head[8..12].try_into().expect("four bytes"));
        let mut payload =
            vec![0; usize::try_from(word(12)).map_err(|_| io::ErrorKind::InvalidData)?];
        from.read_exact(&mut payload)?;
        Ok(Self {
            id: word(0),
            status,
            payload,
        })
    }
}
