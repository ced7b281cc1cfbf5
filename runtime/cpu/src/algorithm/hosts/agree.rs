//! All ranks agree on a step, and receive the data that is sent with the headers: first inside each host, then
//! between hosts.
//!
//! 1. In one phase, the ranks of a host compare signatures and show each other their bytes. If signatures
//!    differ, they show their headers in another phase.
//! 2. The first rank of each host sends its host's headers and bytes to the other hosts' first ranks ([`Agreement`]).
//! 3. The first rank of each host shows the result to the other ranks of its host: the data of all ranks (for lists of
//!    counts, only the largest sum), or the reason why there is no agreement.

use super::HostTransports;
use super::host_exchange::HostExchange;
use crate::algorithm::agree::{Agreement, Participants};
use crate::collective::op_header::{self, Disagreement, OP_HEADER_LEN, OpHeader};
use crate::collective::{Position, compare_lists, has_lists};
use crate::mesh::layout::Layout;
use crate::transport::shm::{INLINE, SLOT};
use crate::wait::{Failure, WaitPolicy};

/// The number of bytes that each rank sends with its header. Except for `List`, all ranks know it beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contribution {
    /// No bytes.
    Nothing,
    /// This many bytes from each rank.
    Each(usize),
    /// Bytes from one rank alone: the rank, and how many bytes it sends.
    One(usize, usize),
    /// A list of counts, of unknown length.
    List,
}

impl Contribution {
    /// Returns the number of bytes of `rank`, if it is known.
    fn len_of(self, rank: usize) -> Option<usize> {
        match self {
            Self::Nothing => Some(0),
            Self::Each(len) => Some(len),
            Self::One(sender, len) => Some(if sender == rank { len } else { 0 }),
            Self::List => None,
        }
    }

    /// Returns a number of bytes that is enough for the slot or line of any rank.
    fn max_len(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Each(len) | Self::One(_, len) => len,
            Self::List => SLOT,
        }
    }
}

/// The bytes that all ranks have sent in the last agreement, in order of ranks; lists of counts only on the first rank
/// of a host.
#[derive(Default)]
pub(super) struct HostAgreement {
    bytes: Vec<u8>,
    /// Where each rank's bytes start, and where the last one's end.
    starts: Vec<usize>,
    /// The largest sum of a rank's list of counts, in bytes: a list has the parts of a rooted operation, or those that
    /// the rank sends.
    max_listed: usize,
    /// The exchange between the hosts' first ranks.
    agreement: Agreement,
}

/// First byte of the line of a host's first rank if all ranks agree.
const AGREED: u8 = 1;
/// First byte of the same line if the ranks do not agree: the slot of the next phase then holds the reason.
const REFUSED: u8 = 2;
/// Bytes at the beginning of the same line: the first byte, and seven of [`HostAgreement::max_listed`]. The data of
/// all ranks follows them if it fits into the line.
const HEAD: usize = 8;
/// The largest number in seven bytes.
const MAX_LISTED: u64 = u64::MAX >> 8;
/// Bytes for the reason why ranks do not agree: the rank, the length and the text.
const REASON: usize = 4096;

impl HostAgreement {
    /// The bytes of `rank`.
    pub(super) fn bytes_of(&self, rank: usize) -> &[u8] {
        &self.bytes[self.starts[rank]..self.starts[rank + 1]]
    }

    /// The largest sum of a rank's list of counts in the last agreement, in bytes, if it had lists: the same on all
    /// ranks.
    pub(super) fn max_listed(&self) -> usize {
        self.max_listed
    }

    /// Exchanges headers and data with all ranks.
    ///
    /// # Errors
    /// `Mismatch` on all ranks if the headers differ or the lists of counts do not match. `TooManyCounts` if this
    /// rank's list does not fit into a slot. `Garbled` if another rank sends malformed bytes. Otherwise those of the
    /// phases and channels.
    pub(super) fn exchange(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        op_header: OpHeader,
        (contribution, own_bytes): (Contribution, &[u8]),
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        self.bytes.clear();
        self.starts.clear();
        self.max_listed = 0;
        via.host_exchange.begin(op_header.signature());
        let differing = self.agree_inside_host(
            via.host_exchange,
            op_header,
            contribution,
            own_bytes,
            policy,
        )?;
        // Ranks that disagree expect different lengths.
        let expected = if differing.is_some() {
            Contribution::Nothing
        } else {
            contribution
        };
        let len = (0..position.size)
            .filter_map(|rank| expected.len_of(rank))
            .sum();
        if via.layout.index_on_host() > 0 {
            return self.receive_agreed(via, position, expected, len, policy);
        }
        self.announce(via, op_header, differing, policy)?;
        let outcome = match self.compare(via)? {
            Ok(()) => self.order_by_rank(via, position, op_header, contribution)?,
            disagreement => disagreement,
        };
        self.show_result(via.host_exchange, &outcome, len, policy)?;
        outcome.map_err(|found| Failure::Mismatch(via.channels.global(found.rank), found.message))
    }

    /// Compares the headers of this host's ranks: returns the headers if they differ, and otherwise stores the ranks'
    /// data in `bytes`.
    fn agree_inside_host(
        &mut self,
        host_exchange: &mut HostExchange,
        op_header: OpHeader,
        contribution: Contribution,
        own_bytes: &[u8],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<Vec<OpHeader>>, Failure> {
        let max_len = contribution.max_len();
        let is_inline = max_len <= INLINE;
        // A list is sent with its header, which has the list's length and the other fields in which ranks may differ.
        let mut list_header = op_header;
        if contribution == Contribution::List {
            if OP_HEADER_LEN + own_bytes.len() > SLOT {
                return Err(Failure::TooManyCounts {
                    counts: own_bytes.len() / 8,
                    most: (SLOT - OP_HEADER_LEN) / 8,
                });
            }
            list_header.inline = own_bytes.len() as u32;
        }
        let header: &[u8] = match contribution {
            Contribution::List => &list_header.encode(),
            _ => &[],
        };
        if host_exchange.size() == 1 {
            self.bytes.extend_from_slice(header);
            self.bytes.extend_from_slice(own_bytes);
            self.starts.extend([0, self.bytes.len()]);
            return Ok(None);
        }
        let (inline, used) = if is_inline {
            (own_bytes, 0)
        } else {
            (&[][..], max_len)
        };
        if !is_inline {
            host_exchange.fill(max_len, |slot, copier| {
                slot[..header.len()].copy_from_slice(header);
                copier.copy(&mut slot[header.len()..][..own_bytes.len()], own_bytes);
            });
        }
        if !host_exchange.run_phase(inline, used, policy)? {
            return self
                .collect_headers(host_exchange, op_header, policy)
                .map(Some);
        }
        for index in 0..host_exchange.size() {
            self.starts.push(self.bytes.len());
            let contributed = match contribution {
                Contribution::List => {
                    let slot = host_exchange.slot(index);
                    let op_header = slot.first_chunk().and_then(OpHeader::decode);
                    let len = op_header.map(|op_header| OP_HEADER_LEN + op_header.inline as usize);
                    len.and_then(|len| slot.get(..len)).ok_or_else(|| {
                        Failure::Garbled(
                            host_exchange.global(index),
                            "a malformed op header".into(),
                        )
                    })?
                }
                _ if is_inline => host_exchange.line(index, max_len),
                _ => host_exchange.slot(index),
            };
            self.bytes.extend_from_slice(contributed);
        }
        self.starts.push(self.bytes.len());
        Ok(None)
    }

    /// Handles different signatures. All ranks of the host have seen the difference, so all show their headers now.
    #[cold]
    fn collect_headers(
        &mut self,
        host_exchange: &mut HostExchange,
        op_header: OpHeader,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Vec<OpHeader>, Failure> {
        host_exchange.restart_slots();
        host_exchange.begin(0);
        host_exchange.fill(OP_HEADER_LEN, |slot, _| {
            slot.copy_from_slice(&op_header.encode())
        });
        host_exchange.run_agreed_phase(&[], OP_HEADER_LEN, policy)?;
        let op_headers = (0..host_exchange.size()).map(|index| {
            let op_header = host_exchange
                .slot(index)
                .first_chunk()
                .and_then(OpHeader::decode);
            op_header.ok_or_else(|| {
                Failure::Garbled(host_exchange.global(index), "a malformed op header".into())
            })
        });
        op_headers.collect()
    }

    /// Exchanges headers between hosts. A host whose ranks agree sends one header and its ranks' data; a host whose
    /// ranks disagree sends the headers of all of them.
    fn announce(
        &mut self,
        via: &mut HostTransports<'_>,
        op_header: OpHeader,
        differing: Option<Vec<OpHeader>>,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let mut ours = vec![u8::from(differing.is_none())];
        match &differing {
            Some(op_headers) => ours.extend(op_headers.iter().flat_map(OpHeader::encode)),
            None => {
                for contributed in self.starts.windows(2) {
                    ours.extend(((contributed[1] - contributed[0]) as u32).to_le_bytes());
                }
                ours.extend_from_slice(&self.bytes);
            }
        }
        let host_header = OpHeader {
            inline: ours.len() as u32,
            ..op_header
        };
        let leaders = via.layout.leaders();
        let participants = Participants {
            members: &leaders,
            index: via.layout.host(),
        };
        self.agreement
            .exchange(via.channels, participants, host_header, &ours, policy)
    }

    /// Compares what the hosts have sent ([`compare_hosts`]). The outer error reports a malformed message of a host.
    fn compare(&self, via: &HostTransports<'_>) -> Result<Result<(), Disagreement>, Failure> {
        let hosts = 0..via.layout.hosts();
        let blocks: Vec<&[u8]> = hosts.map(|host| self.agreement.inline(host)).collect();
        compare_hosts(via.layout, self.agreement.op_headers(), &blocks)
            .map_err(|host| garbled(via, host))
    }

    /// Puts the hosts' data in the order of ranks, and compares lists of counts. The outer error reports a malformed
    /// message of a host.
    fn order_by_rank(
        &mut self,
        via: &HostTransports<'_>,
        position: Position,
        op_header: OpHeader,
        contribution: Contribution,
    ) -> Result<Result<(), Disagreement>, Failure> {
        let layout = via.layout;
        let mut host_parts = Vec::with_capacity(layout.hosts());
        for host in 0..layout.hosts() {
            let contributed = parts(self.agreement.inline(host), layout.ranks_of(host).len());
            host_parts.push(contributed.ok_or_else(|| garbled(via, host))?);
        }
        self.bytes.clear();
        self.starts.clear();
        let mut op_headers = Vec::new();
        for rank in 0..position.size {
            self.starts.push(self.bytes.len());
            let (host, index) = layout.host_and_index(rank);
            let mut part = host_parts[host][index];
            if contribution == Contribution::List {
                let rank_header = part.first_chunk().and_then(OpHeader::decode);
                op_headers.push(rank_header.ok_or_else(|| garbled(via, host))?);
                part = &part[OP_HEADER_LEN..];
            } else if let Some(len) = contribution.len_of(rank) {
                // The part may end with old contents of the rank's line, which are dropped.
                part = part.get(..len).ok_or_else(|| garbled(via, host))?;
            }
            self.bytes.extend_from_slice(part);
        }
        self.starts.push(self.bytes.len());
        if !has_lists(op_header.op) {
            return Ok(Ok(()));
        }
        let lists: Vec<Vec<u64>> = (0..position.size)
            .map(|rank| counts(self.bytes_of(rank)))
            .collect();
        let element = op_header.dtype.size().unwrap_or(1) as u64;
        let sums = lists.iter().map(|list| {
            let counts = list.iter().take(position.size);
            counts.fold(0u64, |sum, &count| sum.saturating_add(count))
        });
        let max_bytes = sums.max().unwrap_or(0).saturating_mul(element);
        self.max_listed = usize::try_from(max_bytes.min(MAX_LISTED)).unwrap_or(usize::MAX);
        Ok(compare_lists(&op_headers, &lists))
    }

    /// Shows the ranks of this host the data of all ranks (`len` bytes, without lists), or the reason why the ranks do
    /// not agree.
    fn show_result(
        &mut self,
        host_exchange: &mut HostExchange,
        outcome: &Result<(), Disagreement>,
        len: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let mut line = [0; INLINE];
        let is_inline = HEAD + len <= INLINE;
        let used = if is_inline { 0 } else { len };
        if let Err(found) = outcome {
            line[0] = REFUSED;
            host_exchange.run_agreed_phase(&line, used, policy)?;
            let reason = reason(found);
            host_exchange.fill(REASON, |slot, _| {
                slot[..reason.len()].copy_from_slice(&reason);
            });
            return host_exchange.run_agreed_phase(&[], REASON, policy);
        }
        line[..HEAD].copy_from_slice(&((self.max_listed as u64) << 8).to_le_bytes());
        line[0] = AGREED;
        let bytes = &self.bytes;
        if is_inline {
            line[HEAD..HEAD + len].copy_from_slice(&bytes[..len]);
        } else {
            host_exchange.fill(len, |slot, copier| copier.copy(slot, &bytes[..len]));
        }
        host_exchange.run_agreed_phase(&line, used, policy)
    }

    /// Receives the data of all ranks (`len` bytes), or the reason why they do not agree, from the first rank of this
    /// host.
    fn receive_agreed(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        contribution: Contribution,
        len: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let host_exchange = &mut *via.host_exchange;
        let is_inline = HEAD + len <= INLINE;
        host_exchange.run_agreed_phase(&[], if is_inline { 0 } else { len }, policy)?;
        let line = host_exchange.line(0, INLINE);
        match line[0] {
            AGREED => {
                let head = line
                    .first_chunk()
                    .map_or(0, |bytes| u64::from_le_bytes(*bytes));
                self.max_listed = usize::try_from(head >> 8).unwrap_or(usize::MAX);
                let contributed = match is_inline {
                    true => &line[HEAD..HEAD + len],
                    false => &host_exchange.slot(0)[..len],
                };
                self.bytes.clear();
                self.bytes.extend_from_slice(contributed);
                self.starts.clear();
                let mut end = 0;
                self.starts.push(end);
                for rank in 0..position.size {
                    end += contribution.len_of(rank).unwrap_or(0);
                    self.starts.push(end);
                }
                Ok(())
            }
            REFUSED => {
                host_exchange.run_agreed_phase(&[], REASON, policy)?;
                Err(match read_reason(host_exchange.slot(0), position.size) {
                    Some(found) => {
                        Failure::Mismatch(via.channels.global(found.rank), found.message)
                    }
                    None => Failure::Garbled(host_exchange.global(0), "a malformed reason".into()),
                })
            }
            _ => Err(Failure::Garbled(
                host_exchange.global(0),
                "neither the ranks' data nor a reason".into(),
            )),
        }
    }
}

/// Compares the hosts' headers; if they differ, or the ranks of a host disagree, compares the headers of all ranks.
/// `blocks` are the bytes that followed the hosts' headers. The outer error is the index of a host whose message is
/// malformed.
fn compare_hosts(
    layout: &Layout,
    host_headers: &[OpHeader],
    blocks: &[&[u8]],
) -> Result<Result<(), Disagreement>, usize> {
    let is_agreed = |host: usize| blocks[host].first() == Some(&1);
    let all_agreed = (0..layout.hosts()).all(is_agreed);
    if all_agreed && op_header::compare(host_headers).is_ok() {
        return Ok(Ok(()));
    }
    let size = (0..layout.hosts()).map(|host| layout.ranks_of(host).len());
    let mut op_headers = vec![host_headers[0]; size.sum()];
    for host in 0..layout.hosts() {
        let rest = blocks[host].get(1..).unwrap_or(&[]);
        for (index, &rank) in layout.ranks_of(host).iter().enumerate() {
            op_headers[rank] = if is_agreed(host) {
                host_headers[host]
            } else {
                let bytes = rest.get(index * OP_HEADER_LEN..);
                let op_header = bytes.and_then(|bytes| bytes.first_chunk());
                op_header.and_then(OpHeader::decode).ok_or(host)?
            };
        }
    }
    match op_header::compare(&op_headers) {
        Err(found) => Ok(Err(found)),
        // All headers are equal, so a host that has reported a disagreement among its ranks was wrong.
        Ok(()) => Err((0..layout.hosts())
            .find(|&host| !is_agreed(host))
            .unwrap_or(layout.host())),
    }
}

/// The failure for a malformed message of the first rank of `host`.
fn garbled(via: &HostTransports<'_>, host: usize) -> Failure {
    let leader = via.channels.global(via.layout.ranks_of(host)[0]);
    Failure::Garbled(leader, "malformed op headers".into())
}

/// Returns the data of each rank of a host; `None` if the block is malformed.
fn parts(block: &[u8], ranks: usize) -> Option<Vec<&[u8]>> {
    let (_, rest) = block.split_first()?;
    let (lens, mut rest) = rest.split_at_checked(ranks * 4)?;
    let mut parts = Vec::with_capacity(ranks);
    for len in lens.as_chunks::<4>().0 {
        let (part, after) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        parts.push(part);
        rest = after;
    }
    rest.is_empty().then_some(parts)
}

/// Decodes a list of counts.
fn counts(bytes: &[u8]) -> Vec<u64> {
    let counts = bytes.as_chunks::<8>().0;
    counts
        .iter()
        .map(|count| u64::from_le_bytes(*count))
        .collect()
}

/// Encodes a disagreement for a slot, in at most [`REASON`] bytes: longer text is cut.
fn reason(found: &Disagreement) -> Vec<u8> {
    let max_text = REASON - 8;
    let mut end = found.message.len().min(max_text);
    while !found.message.is_char_boundary(end) {
        end -= 1;
    }
    let text = &found.message.as_bytes()[..end];
    let head = [found.rank as u32, text.len() as u32];
    let head = head.iter().flat_map(|number| number.to_le_bytes());
    head.chain(text.iter().copied()).collect()
}

/// Decodes what [`reason`] has encoded; `None` if it is malformed, or names no rank of a group of this size.
fn read_reason(slot: &[u8], size: usize) -> Option<Disagreement> {
    let (numbers, text) = slot.split_at_checked(8)?;
    let numbers = numbers.as_chunks::<4>().0;
    let [rank, len] = [0, 1].map(|index| u32::from_le_bytes(numbers[index]) as usize);
    let message = String::from_utf8_lossy(text.get(..len)?).into_owned();
    (rank < size).then_some(Disagreement { rank, message })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::{Stop, WaitMode};
    use rcomm_core::Deadline;
    use rcomm_recorder::model::OpType;
    use std::time::Duration;

    #[test]
    fn reason_reaches_the_other_ranks_whole_or_cut_at_a_character() {
        let found = Disagreement {
            rank: 3,
            message: "in the group, rank 3 called barrier #1".into(),
        };
        let mut slot = reason(&found);
        slot.resize(REASON, 0xff);
        assert_eq!(read_reason(&slot, 4).as_ref(), Some(&found));
        assert_eq!(read_reason(&slot, 3), None);
        let long = Disagreement {
            rank: 0,
            message: "é".repeat(REASON),
        };
        let cut = reason(&long);
        assert!(cut.len() <= REASON);
        let read = read_reason(&cut, 1).unwrap();
        assert!(read.message.chars().all(|c| c == 'é'));
    }

    #[test]
    fn a_list_that_exceeds_a_slot_accuses_no_rank() {
        let stop = Stop::default();
        let deadline = Deadline::In(Duration::from_secs(60));
        let mut policy = WaitPolicy::new(&stop, deadline, WaitMode::Oversubscribed);
        let mut agree = |counts: usize| {
            HostAgreement::default().agree_inside_host(
                &mut HostExchange::new(None, vec![5], 0),
                OpHeader::new(OpType::AllToAll, 1),
                Contribution::List,
                &vec![0; 8 * counts],
                &mut policy,
            )
        };
        let most = (SLOT - OP_HEADER_LEN) / 8;
        assert!(agree(most).is_ok());
        let refused = agree(most + 1);
        assert!(
            matches!(refused, Err(Failure::TooManyCounts { counts, most: limit })
                if counts == most + 1 && limit == most),
            "{refused:?}"
        );
    }

    #[test]
    fn a_hosts_block_is_split_into_its_ranks_parts_or_refused() {
        let block = [&[1][..], &2u32.to_le_bytes(), &1u32.to_le_bytes(), b"abc"].concat();
        assert_eq!(parts(&block, 2).unwrap(), [&b"ab"[..], b"c"]);
        assert!(parts(&block[..block.len() - 1], 2).is_none());
        assert!(parts(&block, 1).is_none());
        assert!(parts(&[], 1).is_none());
    }

    #[test]
    fn a_host_whose_message_contradicts_itself_is_named() {
        let layout = Layout::new(&[Some("a"), Some("a"), Some("b"), Some("b")], 0);
        let header = OpHeader::new(OpType::Barrier, 1);
        let other = OpHeader::new(OpType::AllReduce, 1);
        let disagreeing = |headers: [OpHeader; 2]| {
            let headers = headers.map(|header| header.encode());
            [&[0][..], &headers.concat()].concat()
        };
        let compare = |block: &[u8]| compare_hosts(&layout, &[header; 2], &[&[1], block]);
        assert_eq!(compare(&[1]), Ok(Ok(())));
        let found = compare(&disagreeing([header, other]));
        assert_eq!(found.unwrap().unwrap_err().rank, 3);
        // The second host says that its ranks disagree, but their headers are equal.
        assert_eq!(compare(&disagreeing([header; 2])), Err(1));
        assert_eq!(compare(&[0, 7]), Err(1));
    }
}
