//! The one name of a group, the same in sentences, tables and pictures.

use crate::report::Report;
use crate::report::format::{format_ranks, rank_set, spans};
use crate::report::refs::GroupRef;
use std::collections::{HashMap, HashSet};

/// Names the groups of one report.
///
/// A group has the name or the description that the program gave it, or both as `dp/12`: see [`group_label`]. If
/// groups with other members would have the same name, its ranks follow: `tp of 2,3`. If groups with the same members
/// would, its [`GroupRef::name`] follows.
#[derive(Clone, Debug, Default)]
pub struct GroupNames {
    /// Labels that groups with different members share.
    shared: HashSet<String>,
    /// Labels that groups with different names and the same members share.
    same_ranks: HashSet<String>,
}

impl GroupNames {
    /// The names of these groups, which must be all known groups of the job.
    pub fn new<'a>(groups: impl IntoIterator<Item = &'a GroupRef>) -> Self {
        let mut first: HashMap<String, &GroupRef> = HashMap::new();
        let mut names = Self::default();
        for group in groups {
            let label = group_label(group);
            match first.get(&label) {
                Some(other) if other.ranks != group.ranks => _ = names.shared.insert(label),
                Some(other) if other.name != group.name => _ = names.same_ranks.insert(label),
                Some(_) => {}
                None => _ = first.insert(label, group),
            }
        }
        names
    }

    /// The names of a report's groups.
    pub fn of(report: &Report) -> Self {
        Self::new(report.groups.iter().map(|group| &group.group))
    }

    /// The name of a group.
    pub fn name(&self, group: &GroupRef) -> String {
        let label = group_label(group);
        if self.same_ranks.contains(&label) && label != group.name {
            format!("{label}/{}", group.name)
        } else if self.shared.contains(&label) && !group.ranks.is_empty() {
            format!("{label} of {}", rank_set(&group.ranks, 4))
        } else {
            label
        }
    }

    /// The name of a group in running text, where its ranks are not shown next to it: the ranks follow the name of a
    /// group without a description, as in `7 (ranks 2 and 3)`.
    pub fn in_text(&self, group: &GroupRef) -> String {
        match is_undescribed(group) && !group.ranks.is_empty() {
            true => format!("{} ({})", group_label(group), format_ranks(&group.ranks)),
            false => self.name(group),
        }
    }

    /// One name for several groups: see [`group_labels`].
    pub fn fold<'a>(&self, groups: impl IntoIterator<Item = &'a GroupRef>) -> String {
        let groups: Vec<&GroupRef> = groups.into_iter().collect();
        match groups[..] {
            [one] => self.name(one),
            _ => {
                let labels: Vec<String> = groups.iter().map(|group| group_label(group)).collect();
                group_labels(&labels)
            }
        }
    }

    /// An operation as text: `all_reduce #41 on dp/12`.
    pub fn operation(&self, op: &str, seq: u64, group: &GroupRef) -> String {
        format!("{op} #{seq} on {}", self.name(group))
    }
}

/// The name of a group without regard to other groups: its description, its name, or both as `dp/12`.
///
/// A name that the library made of a hash of the ranks is left out: it says nothing to a reader. A group with neither
/// is `""`.
pub fn group_label(group: &GroupRef) -> String {
    let GroupRef { name, desc, .. } = group;
    if name.is_empty() && is_undescribed(group) {
        return "\"\"".to_owned();
    }
    if is_undescribed(group) || name.starts_with(desc.as_str()) {
        return name.clone();
    }
    // A description distinguishes two backends of one group, like `dp (nccl)`.
    let described = desc.split(" (").next().unwrap_or(desc);
    if described == "default_pg" || name.is_empty() || described == name || is_hash(name) {
        desc.clone()
    } else {
        format!("{desc}/{name}")
    }
}

/// Whether the program gave a group no description.
pub fn is_undescribed(group: &GroupRef) -> bool {
    group.desc.is_empty() || group.desc == "undefined"
}

/// Whether a name begins with a hash, as PyTorch's names of groups that only their members make, or is a communicator's
/// number that the plug-in for NCCL read.
fn is_hash(name: &str) -> bool {
    const DIGITS: usize = 32;
    const COMMUNICATOR_DIGITS: usize = 16;
    let (of_nccl, rest) = match name.strip_prefix("nccl-") {
        Some(rest) => (true, rest),
        None => (false, name),
    };
    let digits = rest.bytes().take_while(u8::is_ascii_hexdigit).count();
    digits >= if of_nccl { COMMUNICATOR_DIGITS } else { DIGITS }
}

/// One label for several groups, like `tp_0..127` or `tp_0,1,3`.
///
/// Labels that differ only in their last number are shown with the spans of that number: at most three spans, then the
/// number of labels left. Labels without a common stem are shown as the first one and the number of others.
pub fn group_labels(labels: &[String]) -> String {
    const SPANS: usize = 3;
    let split = |label: &str| -> Option<(String, u64)> {
        let digits = label
            .rfind(|c: char| !c.is_ascii_digit())
            .map_or(0, |start| {
                start + label[start..].chars().next().map_or(1, char::len_utf8)
            });
        let number = label[digits..].parse().ok()?;
        Some((label[..digits].to_owned(), number))
    };
    let [first, others @ ..] = labels else {
        return String::new();
    };
    if others.iter().all(|label| label == first) {
        return first.clone();
    }
    let parts: Option<Vec<_>> = labels.iter().map(|label| split(label)).collect();
    let have_one_stem =
        |parts: &Vec<(String, u64)>| parts.iter().all(|(stem, _)| *stem == parts[0].0);
    match parts.filter(have_one_stem) {
        Some(parts) => {
            let mut numbers: Vec<u64> = parts.iter().map(|&(_, number)| number).collect();
            numbers.sort_unstable();
            numbers.dedup();
            format!("{}{}", parts[0].0, spans(&numbers, "..", SPANS))
        }
        None => format!("{first} +{}", others.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(name: &str, desc: &str) -> String {
        group_label(&GroupRef {
            name: name.into(),
            desc: desc.into(),
            ranks: [].into(),
        })
    }

    #[test]
    fn a_label_has_the_description_or_the_name_of_a_group_or_both() {
        assert_eq!(group("0", "default_pg"), "default_pg");
        assert_eq!(group("12", "dp"), "dp/12");
        assert_eq!(group("dp_5", "dp"), "dp_5");
        assert_eq!(group("7", "undefined"), "7");
        assert_eq!(group("dp", "dp (nccl)"), "dp (nccl)");
        assert_eq!(group("0", "default_pg (gloo)"), "default_pg (gloo)");
        let hash = "5f4dcc3b5aa765d61d8327deb882cf99aabbccdd_0";
        assert_eq!(group(hash, "mesh_tp"), "mesh_tp");
        assert_eq!(group("nccl-0000000000000abc", "world"), "world");
    }

    #[test]
    fn groups_that_share_a_label_are_named_with_their_ranks() {
        let group = |name: &str, desc: &str, ranks: &[u32]| GroupRef {
            name: name.into(),
            desc: desc.into(),
            ranks: ranks.into(),
        };
        let groups = [
            group("tp", "tp", &[0, 1]),
            group("tp", "tp", &[2, 3]),
            group("dp_0", "dp", &[0, 2]),
            group("dp_1", "dp", &[1, 3]),
            group("7", "", &[1, 2]),
        ];
        let names = GroupNames::new(&groups);
        let each: Vec<String> = groups.iter().map(|group| names.name(group)).collect();
        assert_eq!(each, ["tp of 0,1", "tp of 2,3", "dp_0", "dp_1", "7"]);
        assert_eq!(names.in_text(&groups[4]), "7 (ranks 1 and 2)");
        assert_eq!(names.fold(&groups[..2]), "tp");
        assert_eq!(names.fold(&groups[2..4]), "dp_0,1");
        let numbers = ["nccl-0000000000000abc", "nccl-0000000000000abd"];
        let twins = numbers.map(|name| group(name, "world", &[0, 1]));
        let of_twins = GroupNames::new(&twins);
        assert_eq!(of_twins.name(&twins[0]), "world/nccl-0000000000000abc");
        let of_one = GroupNames::new(&groups[..1]);
        assert_eq!(of_one.name(&groups[0]), "tp");
    }

    #[test]
    fn numbered_labels_fold_into_a_span() {
        let labels: Vec<_> = (0..128).map(|number| format!("tp_{number}")).collect();
        assert_eq!(group_labels(&labels), "tp_0..127");
        let label_of = |numbers: &[u32]| {
            let labels: Vec<_> = numbers
                .iter()
                .map(|number| format!("tp_{number}"))
                .collect();
            group_labels(&labels)
        };
        assert_eq!(label_of(&[0, 1, 3]), "tp_0,1,3", "tp_2 is not among them");
        assert_eq!(label_of(&[0, 1, 2, 4, 6, 8, 9]), "tp_0..2,4,6,+2");
        assert_eq!(group_labels(&["dp".into(), "dp".into()]), "dp");
        assert_eq!(group_labels(&["a".into(), "b".into()]), "a +1");
        assert_eq!(group_labels(&["é1".into(), "é2".into()]), "é1,2");
    }
}
