// Package child runs tests again in processes of their own: those that lose a
// context, end a process on purpose, or would leave a thread stuck where they
// fail.
package child

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

const (
	env = "PURECUDA_TEST_CHILD"
	// deadline bounds a process. It only ever fails a test.
	deadline = 2 * time.Minute
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
