//! Training on several ranks gives the result of a single process, within rounding.

use rcomm_tests::process::run;
use std::path::Path;

#[test]
fn training_on_several_ranks_follows_the_curve_of_one_process() {
    for ranks in [1, 3, 4] {
        let printed = run(Path::new(env!("CARGO_BIN_EXE_ddp")), "ddp", ranks);
        assert!(printed[0].contains("the curves differ by"), "{printed:?}");
    }
}
