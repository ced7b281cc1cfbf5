/* One rank of an MPI library, measured by the program in collectives/.
 *
 * mpi HOST PORT NAME. Each rank connects, sends "NAME RANK\n" and then reads lines "OPERATION BYTES TIMES".
 * It runs the operation TIMES times on f32 and answers "P50 P99 MIN", in microseconds, or "unsupported". Between
 * two lines the rank sleeps on its socket, so that the peer that is measured next has the machine to itself. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <mpi.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define MAX_BYTES ((size_t)64 << 20)
#define MAX_TIMES 20000

static int rank, ranks;
static float *in, *out;
static double times[MAX_TIMES];

static int compare(const void *left, const void *right) {
  double left_time = *(const double *)left, right_time = *(const double *)right;
  return (left_time > right_time) - (left_time < right_time);
}

/* Writes to each cache line of both buffers, as a caller does who computes what is sent. */
static void write_lines(size_t bytes) {
  volatile float *buffers[] = {in, out};
  for (int buffer = 0; buffer < 2; buffer++)
    for (size_t index = 0; index < bytes / sizeof(float); index += 16) buffers[buffer][index] = 0;
}

/* Runs the operation once. Returns 0 if there is no such operation, else 1. */
static int call(const char *name, size_t bytes) {
  int count = bytes / sizeof(float), part = count / ranks > 0 ? count / ranks : 1;
  MPI_Comm world = MPI_COMM_WORLD;
  if (!strcmp(name, "all_reduce")) {
    MPI_Allreduce(MPI_IN_PLACE, out, count, MPI_FLOAT, MPI_SUM, world);
  } else if (!strcmp(name, "barrier")) {
    MPI_Barrier(world);
  } else if (!strcmp(name, "broadcast")) {
    MPI_Bcast(out, count, MPI_FLOAT, 0, world);
  } else if (!strcmp(name, "all_gather")) {
    MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, world);
  } else if (!strcmp(name, "reduce_scatter")) {
    MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, world);
  } else if (!strcmp(name, "all_to_all")) {
    MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, world);
  } else if (!strcmp(name, "send_recv")) {
    if (rank == 0) {
      MPI_Send(in, count, MPI_FLOAT, 1, 0, world);
      MPI_Recv(out, count, MPI_FLOAT, 1, 0, world, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
      MPI_Recv(out, count, MPI_FLOAT, 0, 0, world, MPI_STATUS_IGNORE);
      MPI_Send(in, count, MPI_FLOAT, 0, 0, world);
    }
  } else {
    return 0;
  }
  return 1;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 4) return 2;
  in = aligned_alloc(4096, MAX_BYTES);
  out = aligned_alloc(4096, MAX_BYTES);
  if (!in || !out) return 2;
  memset(in, 0, MAX_BYTES);
  memset(out, 0, MAX_BYTES);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2]))};
  inet_pton(AF_INET, argv[1], &address.sin_addr);
  int control = socket(AF_INET, SOCK_STREAM, 0), enabled = 1;
  if (connect(control, (struct sockaddr *)&address, sizeof address)) return 2;
  setsockopt(control, IPPROTO_TCP, TCP_NODELAY, &enabled, sizeof enabled);
  FILE *lines = fdopen(control, "r");
  dprintf(control, "%s %d\n", argv[3], rank);
  char line[128], name[32];
  size_t bytes;
  int count;
  while (fgets(line, sizeof line, lines)) {
    int words = sscanf(line, "%31s %zu %d", name, &bytes, &count);
    /* With this prefix, every rank writes to its buffers before each call. */
    int is_fresh = words == 3 && !strncmp(name, "fresh_", 6);
    const char *operation = name + (is_fresh ? 6 : 0);
    if (words != 3 || bytes > MAX_BYTES || count < 1 || count > MAX_TIMES || !call(operation, bytes)) {
      dprintf(control, "unsupported\n");
      continue;
    }
    for (int i = 0; i < count / 8; i++) call(operation, bytes);
    MPI_Barrier(MPI_COMM_WORLD);
    double last = MPI_Wtime();
    for (int i = 0; i < count; i++) {
      if (is_fresh) {
        write_lines(bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        last = MPI_Wtime();
      }
      call(operation, bytes);
      double now = MPI_Wtime();
      times[i] = now - last;
      last = now;
    }
    qsort(times, count, sizeof times[0], compare);
    dprintf(control, "%.4f %.4f %.4f\n", times[count / 2] * 1e6, times[count * 99 / 100] * 1e6, times[0] * 1e6);
  }
  MPI_Finalize();
  return 0;
}
