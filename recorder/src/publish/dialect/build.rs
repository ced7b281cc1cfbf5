//! Builds a [`Dump`] from the fields of a file: the part of reading that JSON and pickle share.

use super::intern::{Interner, Recurring, Text, Texts};
use super::keys::Field;
use super::names::{ProfilingName, op_type};
use super::rank_lists::RankLists;
use crate::model::dump::{Dump, DumpGroup, FormatVersion, Recorder, ThreadInfo};
use crate::model::{
    Entry, EntryState, Frame, GroupPlace, OpType, Peer, ProcessGroupInfo, ProcessGroupStatus,
    ReduceOp, Signature,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// One entry while its fields are read, in any order. Shapes are runs of (number of dimensions, extents...), and types
/// are the numbers of their names among the texts.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) fields: Fields,
    pub(super) input_sizes: Vec<u64>,
    pub(super) output_sizes: Vec<u64>,
    pub(super) input_dtypes: Vec<u64>,
    pub(super) output_dtypes: Vec<u64>,
    pub(super) input_splits: Vec<u64>,
    pub(super) output_splits: Vec<u64>,
}

/// The scalar fields of one entry.
#[derive(Clone, Copy, Default)]
pub(super) struct Fields {
    pub(super) record_id: Option<u64>,
    pub(super) pg_id: Option<u32>,
    /// The group's name and description.
    pub(super) group: Option<(Text, Text)>,
    pub(super) collective_seq_id: Option<u64>,
    /// `seq_id`, in dumps of version 1: the `collective_seq_id`.
    pub(super) seq_id: Option<u64>,
    pub(super) p2p_seq_id: u64,
    pub(super) op_id: u64,
    pub(super) profiling_name: Option<Text>,
    pub(super) op_name: Option<Text>,
    pub(super) backend: Option<Text>,
    pub(super) state: EntryState,
    pub(super) failed: bool,
    pub(super) retired: bool,
    pub(super) is_p2p: bool,
    pub(super) peer: Peer,
    pub(super) root: Option<u32>,
    pub(super) reduce_op: Option<ReduceOp>,
    pub(super) time_created_ns: i64,
    pub(super) time_started_ns: i64,
    pub(super) time_completed_ns: i64,
    pub(super) duration_ms: Option<f32>,
    pub(super) graph_id: Option<u64>,
    pub(super) timeout_ms: u64,
    pub(super) thread_id: Option<Text>,
    pub(super) thread_name: Option<Text>,
    /// A stack that the entry itself contains.
    pub(super) stack: Option<u32>,
    /// A stack given by its number in the file's own table.
    pub(super) stack_index: Option<u32>,
    /// The first field whose value is invalid.
    pub(super) bad: Option<Field>,
}

impl Draft {
    /// Empties the draft, and keeps the memory of its vectors.
    pub(super) fn reset(&mut self) {
        self.fields = Fields::default();
        self.input_sizes.clear();
        self.output_sizes.clear();
        self.input_dtypes.clear();
        self.output_dtypes.clear();
        self.input_splits.clear();
        self.output_splits.clear();
    }

    /// The list of input or output shapes.
    pub(super) fn sizes(&mut self, field: Field) -> &mut Vec<u64> {
        match field {
            Field::InputSizes => &mut self.input_sizes,
            _ => &mut self.output_sizes,
        }
    }

    /// The list of input or output types.
    pub(super) fn dtypes(&mut self, field: Field) -> &mut Vec<u64> {
        match field {
            Field::InputDtypes => &mut self.input_dtypes,
            _ => &mut self.output_dtypes,
        }
    }

    /// The list of input or output splits.
    pub(super) fn splits(&mut self, field: Field) -> &mut Vec<u64> {
        match field {
            Field::InputSplits => &mut self.input_splits,
            _ => &mut self.output_splits,
        }
    }

    /// Notes that a field's value is invalid.
    pub(super) fn reject(&mut self, field: Field) {
        self.fields.bad.get_or_insert(field);
    }
}

/// One group of `pg_config`.
#[derive(Default)]
pub(super) struct ConfigGroup {
    pub(super) name: Text,
    pub(super) desc: Text,
    pub(super) ranks: Arc<[u32]>,
    /// The group's local number, if the file has it.
    pub(super) id: Option<u32>,
    /// The rank's number in the group and the number of members, if the file has these instead of the members.
    pub(super) own_rank: Option<u32>,
    pub(super) size: Option<u32>,
}

impl ConfigGroup {
    /// The rank's place in the group, if the file has it and not the members.
    fn place(&self) -> Option<GroupPlace> {
        let (rank, size) = self.own_rank.zip(self.size)?;
        (self.ranks.is_empty() && rank < size).then_some(GroupPlace { rank, size })
    }
}

/// A thread, as entries refer to it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Thread {
    id: Option<Text>,
    name: Option<Text>,
}

/// A parsed profiling name, kept for all entries that have the name.
#[derive(Clone, Copy)]
struct Name {
    backend: Text,
    op_name: Text,
    op: OpType,
    peer: Peer,
}

/// A dump that is being built.
#[derive(Default)]
pub(super) struct Builder {
    pub(super) dump: Dump,
    pub(super) texts: Texts,
    pub(super) draft: Draft,
    /// The groups of `pg_config`.
    pub(super) config: Vec<ConfigGroup>,
    /// The lists of ranks of the files that were read before.
    pub(super) lists: RankLists,
    /// The statuses of `pg_status`, each with the number of its group.
    pub(super) group_status: Vec<(u32, ProcessGroupStatus)>,
    /// The file's own table of stacks; each is a list of indices into the file's own table of frames.
    pub(super) stack_rows: Vec<Vec<u32>>,
    /// For each frame of the file's own table, its index in `dump.frames`.
    pub(super) frame_table: Vec<u32>,
    /// The stack that is being read, as indices into `dump.frames`.
    pub(super) frames_of_stack: Vec<u32>,
    /// Whether something was read that only a dump has.
    pub(super) looks_like_dump: bool,
    pub(super) version: Option<FormatVersion>,
    pub(super) recorder: Option<Recorder>,
    /// Number of entries that were left out.
    pub(super) rejected: usize,
    /// Index of the first entry that was left out, and its key whose value is missing or invalid.
    pub(super) first_rejected: Option<(usize, &'static str)>,
    /// Kind of the value of `entries`, if that is not a list.
    pub(super) entries_kind_if_no_list: Option<&'static str>,
    /// The parsed profiling names, by the number of the text.
    names: Vec<Option<Name>>,
    signatures: Recurring<u64>,
    /// Memory for the key of a signature.
    signature_key: Vec<u64>,
    frames: Recurring<u64>,
    stacks: Recurring<u32>,
    threads: Interner<u64>,
    last_thread: Option<(Thread, u32)>,
    groups: Recurring<u64>,
    /// The name of each group in the dump.
    group_names: Vec<Text>,
    /// The entries that refer to a stack by its number in the file's own table, each with this number.
    pending_stacks: Vec<(u32, u32)>,
}

/// Represents a missing id or text in the keys of the tables, where real ones have at most 32 bits.
const NO_ID: u64 = u64::MAX;

/// Two texts as one number.
fn pair(first: Text, second: Text) -> u64 {
    u64::from(first.0) << 32 | u64::from(second.0)
}

impl Builder {
    /// The index of a frame in the dump, which gets the frame if it is new.
    pub(super) fn frame(&mut self, name: Text, filename: Text, line: u32) -> u32 {
        let key = [name.0.into(), filename.0.into(), line.into()];
        let (id, is_new) = self.frames.intern(&key);
        if is_new {
            self.dump.frames.push(Frame {
                name: self.texts.get(name).to_owned(),
                filename: self.texts.get(filename).to_owned(),
                line,
            });
        }
        id
    }

    /// The index in the dump of the stack in `frames_of_stack`; the dump gets the stack if it is new.
    pub(super) fn stack(&mut self) -> u32 {
        let (id, is_new) = self.stacks.intern(&self.frames_of_stack);
        if is_new {
            self.dump.stacks.push(self.frames_of_stack.clone());
        }
        id
    }

    /// Adds the draft as the next entry, or counts it as rejected, and clears it.
    pub(super) fn push(&mut self) {
        let index = self.dump.entries.len() + self.rejected;
        let invalid_key = match (self.draft.fields.bad, self.draft.fields.profiling_name) {
            (Some(field), _) => Some(field.key()),
            (None, None) => Some(Field::ProfilingName.key()),
            (None, Some(name)) => {
                self.push_entry(name, index as u64);
                None
            }
        };
        if let Some(key) = invalid_key {
            self.reject_entry(key);
        }
        self.draft.reset();
    }

    /// Counts an entry as rejected because of this key, and clears the draft.
    pub(super) fn reject_entry(&mut self, key: &'static str) {
        let index = self.dump.entries.len() + self.rejected;
        self.first_rejected.get_or_insert((index, key));
        self.rejected += 1;
        self.draft.reset();
    }

    /// Adds the draft as an entry. `index` is its record id if the file gives none.
    fn push_entry(&mut self, profiling_name: Text, index: u64) {
        let mut name = self.name(profiling_name);
        if let Some(op_name) = self.draft.fields.op_name {
            name.op_name = op_name;
            name.op = op_type(self.texts.get(op_name));
        }
        name.backend = self.draft.fields.backend.unwrap_or(name.backend);
        let group = self.group();
        let signature = self.signature(name);
        let thread = self.thread();
        let draft = &self.draft.fields;
        if let Some(index) = draft.stack_index {
            self.pending_stacks
                .push((self.dump.entries.len() as u32, index));
        }
        self.dump.entries.push(Entry {
            record_id: draft.record_id.unwrap_or(index),
            collective_seq_id: draft.collective_seq_id.or(draft.seq_id).unwrap_or(0),
            p2p_seq_id: draft.p2p_seq_id,
            op_id: draft.op_id,
            group,
            signature,
            stack: draft.stack,
            op: name.op,
            state: if draft.failed {
                EntryState::Failed
            } else {
                draft.state
            },
            retired: draft.retired,
            is_p2p: draft.is_p2p,
            peer: match draft.peer {
                Peer::None => name.peer,
                peer => peer,
            },
            root: draft.root,
            reduce_op: draft.reduce_op,
            time_created_ns: draft.time_created_ns,
            time_discovered_started_ns: draft.time_started_ns,
            time_discovered_completed_ns: draft.time_completed_ns,
            duration_ms: draft.duration_ms,
            graph_id: draft.graph_id,
            timeout_ms: draft.timeout_ms,
            thread,
        });
    }

    /// The parts of a profiling name, which is parsed at its first use.
    fn name(&mut self, text: Text) -> Name {
        let slot = text.0 as usize;
        if let Some(&Some(name)) = self.names.get(slot) {
            return name;
        }
        // The parts of the name are added to the table of texts, so the name is copied out of that table first.
        let full_name = self.texts.get(text).to_owned();
        let parsed = ProfilingName::parse(&full_name);
        let name = Name {
            backend: self.texts.intern(parsed.backend),
            op_name: self.texts.intern(parsed.op_name),
            op: parsed.op,
            peer: parsed.peer,
        };
        if slot >= self.names.len() {
            self.names.resize(slot + 1, None);
        }
        self.names[slot] = Some(name);
        name
    }

    /// The index in the dump of the draft's group, which is added if it is new.
    fn group(&mut self) -> u32 {
        let id = self.draft.fields.pg_id;
        // Version 1 has no names: there the local number is the key of `pg_config`.
        let (name, desc) = match self.draft.fields.group {
            Some(named) => named,
            None => {
                let name = id.map(|id| id.to_string()).unwrap_or_default();
                (self.texts.intern(&name), self.texts.intern(""))
            }
        };
        let key = [id.map_or(NO_ID, u64::from), pair(name, desc)];
        let (index, is_new) = self.groups.intern(&key);
        if is_new {
            self.group_names.push(name);
            self.dump.groups.push(DumpGroup {
                info: ProcessGroupInfo {
                    id: id.unwrap_or(ProcessGroupInfo::UNKNOWN_ID),
                    name: self.texts.get(name).to_owned(),
                    desc: self.texts.get(desc).to_owned(),
                    ranks: Arc::default(),
                },
                place: None,
                status: None,
            });
        }
        index
    }

    /// The index in the dump of the draft's thread, which is added if it is new; `None` without a thread.
    fn thread(&mut self) -> Option<u32> {
        let thread = Thread {
            id: self.draft.fields.thread_id,
            name: self.draft.fields.thread_name,
        };
        if thread.id.is_none() && thread.name.is_none() {
            return None;
        }
        // Nearly all entries have the same thread.
        if let Some((known, index)) = self.last_thread
            && known == thread
        {
            return Some(index);
        }
        let part = |text: Option<Text>| text.map_or(NO_ID, |text| text.0.into());
        let key = [part(thread.id), part(thread.name)];
        let (index, is_new) = self.threads.intern(&key);
        if is_new {
            let owned =
                |text: Option<Text>| text.map_or("", |text| self.texts.get(text)).to_owned();
            let info = ThreadInfo {
                id: owned(thread.id),
                name: owned(thread.name),
            };
            self.dump.threads.push(info);
        }
        self.last_thread = Some((thread, index));
        Some(index)
    }

    /// The index in the dump of the draft's signature, which is added if it is new.
    fn signature(&mut self, name: Name) -> u32 {
        let key = &mut self.signature_key;
        let draft = &self.draft;
        key.clear();
        key.push(pair(name.backend, name.op_name));
        for [input, output] in [
            [&draft.input_sizes, &draft.output_sizes],
            [&draft.input_dtypes, &draft.output_dtypes],
            [&draft.input_splits, &draft.output_splits],
        ] {
            // Files have less than 4 GiB, so lists are shorter than that.
            key.push((input.len() as u64) << 32 | output.len() as u64);
            key.extend_from_slice(input);
            key.extend_from_slice(output);
        }
        let (index, is_new) = self.signatures.intern(key);
        if is_new {
            let texts = &self.texts;
            let dtypes = |ids: &[u64]| {
                ids.iter()
                    .map(|&id| texts.get(Text(id as u32)).to_owned())
                    .collect()
            };
            self.dump.signatures.push(Signature {
                backend: texts.get(name.backend).to_owned(),
                op_name: texts.get(name.op_name).to_owned(),
                input_sizes: shapes(&draft.input_sizes),
                output_sizes: shapes(&draft.output_sizes),
                input_dtypes: dtypes(&draft.input_dtypes),
                output_dtypes: dtypes(&draft.output_dtypes),
                input_splits: draft.input_splits.clone(),
                output_splits: draft.output_splits.clone(),
            });
        }
        index
    }

    /// The dump, with entries, groups and statuses joined, whatever their order in the file.
    pub(super) fn finish(mut self) -> Dump {
        self.resolve_stacks();
        self.join_groups();
        self.dump.version = self.version.unwrap_or_default();
        self.dump.recorder = match self.recorder {
            Some(recorder) => recorder,
            None => super::recorder::detect(&self.dump),
        };
        if self.dump.recorder == Recorder::NativeGloo {
            super::recorder::merge_unnamed_gloo_group(&mut self.dump);
        }
        self.dump
    }

    /// Adds the file's own stacks to the dump, and sets those of the entries that refer to them by number.
    fn resolve_stacks(&mut self) {
        let mut stack_of_row = Vec::with_capacity(self.stack_rows.len());
        for row in std::mem::take(&mut self.stack_rows) {
            let frame = |&index: &u32| self.frame_table.get(index as usize).copied();
            self.frames_of_stack = row.iter().filter_map(frame).collect();
            stack_of_row.push(self.stack());
        }
        for &(entry, index) in &self.pending_stacks {
            self.dump.entries[entry as usize].stack = stack_of_row.get(index as usize).copied();
        }
    }

    /// Gives each group of the entries its members and status; groups without entries follow.
    ///
    /// A file that numbers its groups itself (as rcomm's do) keeps its order of groups.
    fn join_groups(&mut self) {
        let mut groups_of_name: HashMap<Text, Vec<usize>> = HashMap::new();
        for (index, &name) in self.group_names.iter().enumerate() {
            groups_of_name.entry(name).or_default().push(index);
        }
        let mut group_of_config: Vec<Option<usize>> = Vec::new();
        for config in &self.config {
            let mut found = None;
            for &index in groups_of_name.get(&config.name).into_iter().flatten() {
                let group = &mut self.dump.groups[index];
                let info = &mut group.info;
                if config.id.is_none_or(|id| id == info.id) {
                    group.place = config.place();
                    if info.ranks.is_empty() {
                        info.ranks = config.ranks.clone();
                    }
                    if info.desc.is_empty() {
                        self.texts.get(config.desc).clone_into(&mut info.desc);
                    }
                    found = Some(index);
                }
            }
            group_of_config.push(found);
        }
        let mut ids: Vec<Option<u32>> = self.config.iter().map(|config| config.id).collect();
        self.number_unused(&group_of_config, &mut ids);
        for ((config, found), id) in self.config.iter().zip(&mut group_of_config).zip(&ids) {
            if found.is_none() {
                *found = Some(self.dump.groups.len());
                self.dump.groups.push(DumpGroup {
                    info: ProcessGroupInfo {
                        id: id.unwrap_or(ProcessGroupInfo::UNKNOWN_ID),
                        name: self.texts.get(config.name).to_owned(),
                        desc: self.texts.get(config.desc).to_owned(),
                        ranks: config.ranks.clone(),
                    },
                    place: config.place(),
                    status: None,
                });
            }
        }
        let status_of: HashMap<u32, ProcessGroupStatus> =
            self.group_status.iter().copied().collect();
        for group in &mut self.dump.groups {
            group.status = status_of.get(&group.info.id).copied();
        }
        let numbered = self.config.iter().all(|config| config.id.is_some());
        let in_file_order = if numbered {
            group_of_config.into_iter().flatten().collect()
        } else {
            Vec::new()
        };
        self.settle_groups(in_file_order);
    }

    /// Sets the numbers in `ids` of groups that no entry mentions, where they can be inferred.
    ///
    /// `pg_config` is keyed by name and `pg_status` by number. PyTorch names its groups by ascending integers and
    /// numbers them in the same order. So if as many names as numbers are left over, and all names are integers, names
    /// and numbers belong together in ascending order. A single name and a single number belong together whatever the
    /// name.
    fn number_unused(&self, group_of_config: &[Option<usize>], ids: &mut [Option<u32>]) {
        let mut names: Vec<(u64, usize)> = Vec::new();
        for (index, config) in self.config.iter().enumerate() {
            if group_of_config[index].is_none() && config.id.is_none() {
                let number = self.texts.get(config.name).parse().ok();
                names.push((number.unwrap_or(NO_ID), index));
            }
        }
        let used: HashSet<u32> = self.dump.groups.iter().map(|group| group.info.id).collect();
        let mut numbers: Vec<u32> = self.group_status.iter().map(|&(id, _)| id).collect();
        numbers.retain(|id| !used.contains(id));
        let certain = names.len() == 1 || names.iter().all(|&(number, _)| number != NO_ID);
        if names.len() == numbers.len() && certain {
            names.sort_unstable();
            numbers.sort_unstable();
            for ((_, index), id) in names.into_iter().zip(numbers) {
                ids[index] = Some(id);
            }
        }
    }

    /// Puts the groups with the indices `leading` before the others, in that order, and merges groups that turn out
    /// to be equal (an entry may leave out the description).
    fn settle_groups(&mut self, leading: Vec<usize>) {
        let count = self.dump.groups.len();
        let mut new_of_old = vec![u32::MAX; count];
        let mut groups: Vec<_> = self.dump.groups.drain(..).map(Some).collect();
        let mut known = HashMap::new();
        for old in leading.into_iter().chain(0..count) {
            if let Some(group) = groups[old].take() {
                let info = &group.info;
                let key = (info.id, info.name.clone(), info.desc.clone());
                let next = self.dump.groups.len() as u32;
                let new = *known.entry(key).or_insert(next);
                new_of_old[old] = new;
                if new == next {
                    self.dump.groups.push(group);
                }
            }
        }
        for entry in &mut self.dump.entries {
            entry.group = new_of_old[entry.group as usize];
        }
    }
}

/// Shapes from a run of (number of dimensions, extents...).
fn shapes(mut run: &[u64]) -> Vec<Vec<u64>> {
    let mut shapes = Vec::new();
    while let [dimensions, rest @ ..] = run {
        let (shape, rest) = rest.split_at((*dimensions as usize).min(rest.len()));
        shapes.push(shape.to_vec());
        run = rest;
    }
    shapes
}
