package archtest

import (
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// block is a fenced block of Go in a text.
var block = regexp.MustCompile("(?ms)^```go\n(.*?)^```$")

// The README's program is formatted, passes vet outside of this module's
// folders, and does on the simulator what it says. Its fragment of a test,
// within a test, passes.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := block.FindAllStringSubmatch(string(text), -1)
	if len(blocks) != 2 || !strings.HasPrefix(blocks[0][1], "package main\n") {
		t.Fatalf("the README has %d blocks of Go, want a program and a fragment of a test", len(blocks))
	}
	program, fragment := blocks[0][1], blocks[1][1]
	const open = "driver.Open()"
	if strings.Count(program, open) != 1 {
		t.Fatal("the README's program does not open the driver once")
	}
	for _, code := range []string{program, fragment} {
		if formatted, err := format.Source([]byte(code)); err != nil || string(formatted) != code {
			t.Errorf("gofmt would change the README (%v):\n%s", err, formatted)
		}
	}
	dir := t.TempDir()
	write := func(name, code string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(code), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	run := func(args ...string) string {
		t.Helper()
		// In this module, so that the module's own packages are meant; the files
		// are in another folder, and may not import what is internal.
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = "../.."
		cmd.Env = append(os.Environ(), "GOPROXY=off")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("go %s: %v\n%s", args[0], err, out)
		}
		return string(out)
	}
	main := write("main.go", program)
	test := write("main_test.go", `package main

import (
	"testing"

	"github.com/purecuda/purecuda/cudasim"
	"github.com/purecuda/purecuda/driver"
)

func use(*driver.Driver) {}

func TestFragment(t *testing.T) {
`+fragment+"}\n")
	run("vet", main, test)
	run("test", main, test)

	simulated := strings.Replace(program, open, "cudasim.New(cudasim.Config{}).Driver()", 1)
	simulated = strings.Replace(simulated, `"github.com/purecuda/purecuda/driver"`, `"github.com/purecuda/purecuda/cudasim"`, 1)
	if out := run("run", write("simulated.go", simulated)); !strings.HasPrefix(out, "hello from ") {
		t.Errorf("the README's program prints %q", out)
	}
}
