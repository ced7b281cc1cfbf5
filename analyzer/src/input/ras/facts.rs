//! From what RAS says of everybody to what is wrong with whom.

use super::communicator::{Communicator, Member, MemberState};
use super::{Fact, What, Who};

/// What is wrong, in the order of the communicators.
pub(super) fn of(communicators: &[Communicator]) -> Vec<Fact> {
    let mut facts = Vec::new();
    for communicator in communicators {
        let fact = |member: &Member, what| Fact {
            who: who(member, communicator),
            what,
        };
        for member in &communicator.members {
            let what = match &member.state {
                MemberState::Dead => What::Dead,
                MemberState::Unresponsive => What::Unresponsive,
                MemberState::Failed(error) => What::Error(error.clone()),
                MemberState::Aborted => What::Aborted,
                MemberState::Running
                | MemberState::Initialising
                | MemberState::Finalizing
                | MemberState::Absent => continue,
            };
            facts.push(fact(member, what));
        }
        for late in communicator.behind() {
            let what = What::Behind {
                function: late.kind.to_owned(),
                launched: late.launched,
                others: late.others,
            };
            facts.push(fact(late.member, what));
        }
    }
    facts
}

fn who(member: &Member, communicator: &Communicator) -> Who {
    let process = &member.process;
    Who {
        host: process.host.clone(),
        pid: process.pid,
        device: process
            .device
            .map(|device| device.to_string())
            .unwrap_or_default(),
        rank: member.rank.map(|rank| (rank, communicator.size)),
    }
}
