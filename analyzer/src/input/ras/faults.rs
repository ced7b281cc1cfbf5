//! Lists the faults of the communicators' members: bad states, and members that launched fewer operations than most.

use super::communicator::{Communicator, Member, MemberState};
use super::{RasFault, RasFaultKind, RasSubject};

/// The faults by communicator; within one, bad states before members that are behind.
pub(super) fn list(communicators: &[Communicator]) -> Vec<RasFault> {
    let mut faults = Vec::new();
    for communicator in communicators {
        let fault = |member: &Member, kind| RasFault {
            process: process_of(member, communicator),
            kind,
        };
        for member in &communicator.members {
            let kind = match &member.state {
                MemberState::Dead => RasFaultKind::Dead,
                MemberState::Unresponsive => RasFaultKind::Unresponsive,
                MemberState::Failed(error) => RasFaultKind::Error(error.clone()),
                MemberState::Aborted => RasFaultKind::Aborted,
                MemberState::Running
                | MemberState::Initializing
                | MemberState::Finalizing
                | MemberState::Absent => continue,
            };
            faults.push(fault(member, kind));
        }
        for late in communicator.behind() {
            let kind = RasFaultKind::Behind {
                function: late.kind.to_owned(),
                launched: late.launched,
                others: late.others,
            };
            faults.push(fault(late.member, kind));
        }
    }
    faults
}

fn process_of(member: &Member, communicator: &Communicator) -> RasSubject {
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
