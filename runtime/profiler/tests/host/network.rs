//! A network transfer as NCCL's proxy thread reports it (`sendProxyProgress` and `recvProxyProgress`,
//! transport/net.cc:1304 and 1467 of NCCL 2.30.7, 1094 and 1249 of 2.26.2).

use crate::library::{Comm, Handle, NONE, Plugin};
use rcomm_nccl_profiler::abi::state;
use std::ffi::c_int;

/// The number of steps of a transfer.
pub(crate) const STEPS: i32 = 16;
/// The largest number of steps under way (`NCCL_STEPS`).
const UNDER_WAY: i32 = 8;

/// The state of a transfer that makes progress, since version 4.
const IN_PROGRESS: c_int = 19;

/// A transfer in progress.
pub(crate) struct Transfer<'p> {
    plugin: &'p Plugin,
    comm: &'p Comm,
    handle: Handle,
    is_send: bool,
    steps: [Handle; STEPS as usize],
    /// Numbers of steps: begun, transmitted, and done.
    posted: i32,
    transmitted: i32,
    done: i32,
}

impl<'p> Transfer<'p> {
    /// Begins a transfer and posts its first steps.
    pub(crate) fn begin(
        plugin: &'p Plugin,
        comm: &'p Comm,
        task: Handle,
        (channel, peer, is_send): (u8, i32, bool),
    ) -> Self {
        let end = (channel, peer, is_send);
        let handle = plugin.transfer(comm, task, end, std::process::id());
        if plugin.version > 3 {
            plugin.record(handle, IN_PROGRESS, 0, 0);
        }
        let mut transfer = Self {
            plugin,
            comm,
            handle,
            is_send,
            steps: [NONE; STEPS as usize],
            posted: 0,
            transmitted: 0,
            done: 0,
        };
        transfer.post();
        transfer
    }

    /// Reports a state of a step. Version 3 reports it first as a state of the transfer, with the number of the steps
    /// that have reached it. Then it is reported as a state of the step, if there is such a state.
    fn state(&self, step: i32, of_transfer: c_int, of_step: Option<c_int>) {
        if self.plugin.version == 3 {
            self.plugin.record(self.handle, of_transfer, 0, step + 1);
        }
        if let Some(state) = of_step {
            self.plugin.record(self.steps[step as usize], state, 0, 0);
        }
    }

    /// Begins as many steps as may be under way.
    fn post(&mut self) {
        while self.posted < STEPS.min(self.done + UNDER_WAY) {
            let step = self.posted;
            // NCCL begins a step of a receive again until the network takes it; this program does so for sends as well.
            for _ in 0..2 {
                self.steps[step as usize] = self.plugin.step(self.comm, self.handle, step);
            }
            let (of_transfer, of_step) = match self.is_send {
                true => (state::SEND_POSTED, state::SEND_GPU_WAIT),
                false => (state::RECV_POSTED, state::RECV_WAIT),
            };
            self.state(step, of_transfer, Some(of_step));
            self.posted += 1;
        }
    }

    /// Passes the data of the next step to the network, or from it to the device.
    fn transmit(&mut self) {
        let step = self.transmitted;
        if self.is_send {
            // NCCL asks for the peer's permission again until it has it.
            let asks = (self.plugin.version > 3).then_some(state::SEND_PEER_WAIT);
            for _ in 0..3 {
                self.state(step, state::SEND_REM_FIFO_WAIT, asks);
            }
            self.state(step, state::SEND_TRANSMITTED, Some(state::SEND_WAIT));
        } else {
            self.state(step, state::RECV_RECEIVED, Some(state::RECV_FLUSH_WAIT));
            self.state(step, state::RECV_TRANSMITTED, Some(state::RECV_GPU_WAIT));
        }
        self.transmitted += 1;
    }

    /// Completes steps until `done` steps are done. Of a send, the network then has up to `ahead` further steps.
    pub(crate) fn progress(&mut self, done: i32, ahead: i32) {
        let ahead = if self.is_send { ahead } else { 0 };
        while self.done < done {
            while self.transmitted < (self.done + 1 + ahead).min(STEPS) {
                self.transmit();
            }
            self.plugin.stop(self.steps[self.done as usize]);
            self.done += 1;
            if self.plugin.version == 3 {
                let state = match self.is_send {
                    true => state::SEND_DONE,
                    false => state::RECV_DONE,
                };
                self.plugin.record(self.handle, state, 0, self.done);
            }
            self.post();
        }
    }

    /// Ends a transfer whose steps are all done.
    pub(crate) fn end(self) {
        assert_eq!(self.done, STEPS);
        self.plugin.stop(self.handle);
    }
}
