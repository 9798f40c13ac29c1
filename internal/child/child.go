// Package child runs tests again in processes of their own: those that lose a
// context, end a process on purpose, or would leave a thread stuck where they
// fail.
package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	env = "PURECUDA_TEST_CHILD"
	// deadline bounds a process. It only ever fails a test.
	deadline = 2 * time.Minute
	// grace is what a process that is late has for telling where it is.
	grace = 5 * time.Second
)

// Is tells whether this process was started by Run or Command.
func Is() bool { return os.Getenv(env) != "" }

// Command returns the command that runs the test t alone in a process of its own.
func Command(ctx context.Context, t testing.TB, environ ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	pattern := "^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$"
	cmd := exec.CommandContext(ctx, exe, "-test.run="+pattern, "-test.v", "-test.count=1")
	cmd.Env = append(append(os.Environ(), env+"=1"), environ...)
	return cmd
}

// End runs the test t alone in a process of its own, which ends in its own way,
// and returns what it wrote and its exit status. One that goes on past the limit
// is asked for its stacks, killed, and an error, as one that a signal ends is. Any
// goroutine may call it.
func End(t testing.TB, limit time.Duration, environ ...string) (out string, status int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := Command(ctx, t, environ...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = grace
	type end struct {
		out []byte
		err error
	}
	ended := make(chan end, 1)
	go func() {
		out, err := cmd.CombinedOutput()
		ended <- end{out, err}
	}()
	select {
	case e := <-ended:
		var exit *exec.ExitError
		switch {
		case ctx.Err() != nil:
			return string(e.out), -1, fmt.Errorf("it had not ended after %v: %w", limit, ctx.Err())
		case errors.As(e.err, &exit) && exit.Exited():
			return string(e.out), exit.ExitCode(), nil
		}
		return string(e.out), 0, e.err
	case <-time.After(limit + 2*grace):
		return "", -1, fmt.Errorf("it had not ended after %v, and a kill does not end it", limit)
	}
}

// Run runs the test t alone in a process of its own, which must pass it, and
// waits for its end.
func Run(t testing.TB, environ ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	out, err := Command(ctx, t, environ...).CombinedOutput()
	switch {
	case err != nil:
		t.Fatalf("in a process of its own: %v\n%s", err, out)
	case !bytes.Contains(out, []byte("--- PASS: "+t.Name()+" ")):
		t.Fatalf("the process of its own did not run the test\n%s", out)
	}
	t.Logf("in a process of its own:\n%s", out)
}
