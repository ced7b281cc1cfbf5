//! Runs one program under launchers of other projects, each of which passes rank and size in its own variables, and
//! under the scripts of `examples/several-hosts`.

use std::io::Write;
use std::process::{Command, Output};
use std::time::Duration;

/// Prints why a test is skipped. It writes to the stream itself, because the test harness captures the output of
/// macros.
fn skip(reason: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}

/// Runs the command to its end. If the ranks do not find each other, their time-outs end it.
fn run(command: &mut Command) -> Output {
    command
        .env("RCOMM_RING_DIR", "memory")
        .env(
            "RCOMM_TIMEOUT_MS",
            Duration::from_secs(30).as_millis().to_string(),
        )
        .env(
            "RCOMM_INIT_TIMEOUT_MS",
            Duration::from_secs(30).as_millis().to_string(),
        )
        .output()
        .unwrap_or_else(|error| panic!("{command:?} does not start: {error}"))
}

/// The standard output and the standard error.
fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!(
        "{}{}",
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(err)
    )
}

#[test]
fn ranks_of_open_mpi_find_each_other_without_further_variables() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        return skip("mpirun is not installed");
    }
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "4"]);
    let output = run(mpirun.arg(env!("CARGO_BIN_EXE_rank")).arg("none"));
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn ranks_of_torchrun_find_each_other_through_its_store() {
    let Some(python) = std::env::var_os("RCOMM_TEST_PYTHON") else {
        return skip("RCOMM_TEST_PYTHON names no Python with torch");
    };
    let mut torchrun = Command::new(python);
    torchrun.args([
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--no-python",
    ]);
    torchrun.args(["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]);
    let output = run(torchrun.arg(env!("CARGO_BIN_EXE_rank")).arg("none"));
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn ranks_of_mpich_find_each_other_at_the_given_port() {
    if Command::new("mpiexec.hydra")
        .arg("--version")
        .output()
        .is_err()
    {
        return skip("MPICH's mpiexec.hydra is not installed");
    }
    let port = rcomm_tests::process::free_port().to_string();
    let mut mpiexec = Command::new("mpiexec.hydra");
    mpiexec.args(["-genv", "MASTER_PORT", &port, "-n", "4"]);
    let output = run(mpiexec.arg(env!("CARGO_BIN_EXE_rank")).arg("none"));
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn ranks_of_slurm_find_each_other_without_further_variables() {
    let answers = Command::new("srun")
        .args(["--immediate=10", "true"])
        .output();
    if !answers.is_ok_and(|output| output.status.success()) {
        return skip("no Slurm answers srun");
    }
    let mut srun = Command::new("srun");
    srun.args(["--immediate=10", "--overcommit", "-N", "1", "-n", "4"]);
    let output = run(srun.arg(env!("CARGO_BIN_EXE_rank")).arg("none"));
    assert!(output.status.success(), "{}", text(&output));
}

const RECIPES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/several-hosts");

/// Runs a job of four ranks by a script of `examples/several-hosts`, which imitates the hosts that `hosts` describes.
fn run_recipe(script: &str, hosts: &[&str], change: impl FnOnce(&mut Command)) -> Output {
    let mut command = Command::new(format!("{RECIPES}/{script}"));
    command
        .args(hosts)
        .args([env!("CARGO_BIN_EXE_rank"), "none"])
        .env("MASTER_PORT", rcomm_tests::process::free_port().to_string());
    change(&mut command);
    run(&mut command)
}

#[test]
fn the_recipe_for_several_hosts_under_open_mpi_works() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        return skip("mpirun is not installed");
    }
    let output = run_recipe("mpi.sh", &["imitate:2x2"], |mpirun| {
        mpirun
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    });
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn the_recipe_for_several_hosts_under_rcomm_run_works() {
    let test = std::env::current_exe().expect("the path of this test");
    let build = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    if !build.join("rcomm-run").exists() {
        return skip("rcomm-run is not built; cargo build -p rcomm-tools builds it");
    }
    let output = run_recipe("rcomm-run.sh", &["imitate", "2", "2"], |command| {
        command.env("RCOMM_RUN", build.join("rcomm-run"));
    });
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn the_recipe_for_several_hosts_under_torchrun_works() {
    let Some(python) = std::env::var_os("RCOMM_TEST_PYTHON") else {
        return skip("RCOMM_TEST_PYTHON names no Python with torch");
    };
    let output = run_recipe("torchrun.sh", &["imitate", "2", "2"], |command| {
        command.env("PYTHON", python);
    });
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn the_recipes_for_several_hosts_are_valid_scripts() {
    for script in ["mpi.sh", "torchrun.sh", "rcomm-run.sh", "slurm.sbatch"] {
        let checked = Command::new("bash")
            .args(["-n", &format!("{RECIPES}/{script}")])
            .output();
        let checked = checked.expect("bash starts");
        assert!(checked.status.success(), "{script}: {}", text(&checked));
    }
}
