//! Groups for which the ring has no row left.

use super::failing;
use rcomm::{Config, GroupOptions};
use rcomm_tests::world::{Carrier, on_threads};
use std::time::Duration;

#[test]
fn the_error_of_a_group_for_which_the_ring_has_no_row_says_who_has_come() {
    // The rows of a ring, one of which the world's group has.
    const ROWS: u32 = 1_024;
    let change = |config: &mut Config| {
        failing(config);
        config.status_wait = Duration::from_secs(40);
    };
    on_threads(2, &Carrier::Cpu, change, |world| {
        for at in 0..ROWS {
            let options = GroupOptions::named(format!("group {at}"));
            let group = world.new_group(&[0, 1], &options).unwrap();
            group.destroy().unwrap();
        }
        let options = GroupOptions {
            timeout: Some(Duration::from_millis(500)),
            ..GroupOptions::named("late")
        };
        let group = world.new_group(&[0, 1], &options).unwrap();
        group.within(Duration::from_secs(40)).barrier().unwrap();
        if world.rank() == 1 {
            let done = world.store().wait(&["test/done"], Duration::from_secs(120));
            return done.unwrap();
        }
        let error = group.barrier().unwrap_err();
        world.store().set("test/done", b"1").unwrap();
        let text = error.to_string();
        let status = "arrived: rank 0; not arrived: rank 1 (last collective here is #1)";
        assert!(text.contains(status), "{text}");
        assert_eq!(error.ranks(), [1], "{text}");
    });
}
