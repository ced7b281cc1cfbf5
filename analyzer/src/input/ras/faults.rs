//! Finds the faults in the states of all processes in a RAS report.

use super::communicator::{Communicator, Member, MemberState};
use super::{Fact, RasState, RasSubject};

/// The faults in the order of the communicators.
pub(super) fn of(communicators: &[Communicator]) -> Vec<Fact> {
    let mut facts = Vec::new();
    for communicator in communicators {
        let fact = |member: &Member, what| Fact {
            who: who(member, communicator),
            what,
        };
        for member in &communicator.members {
            let what = match &member.state {
                MemberState::Dead => RasState::Dead,
                MemberState::Unresponsive => RasState::Unresponsive,
                MemberState::Failed(error) => RasState::Error(error.clone()),
                MemberState::Aborted => RasState::Aborted,
                MemberState::Running
                | MemberState::Initializing
                | MemberState::Finalizing
                | MemberState::Absent => continue,
            };
            facts.push(fact(member, what));
        }
        for late in communicator.behind() {
            let what = RasState::Behind {
                function: late.kind.to_owned(),
                launched: late.launched,
                others: late.others,
            };
            facts.push(fact(late.member, what));
        }
    }
    facts
}

fn who(member: &Member, communicator: &Communicator) -> RasSubject {
    let process = &member.process;
    RasSubject {
        host: process.host.clone(),
        pid: process.pid,
        device: process
            .device
            .map(|device| device.to_string())
            .unwrap_or_default(),
        rank: member.rank.map(|rank| (rank, communicator.size)),
    }
}
