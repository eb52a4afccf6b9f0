package scenario

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const program = "github.com/virgate/virgate/cmd/virgate"

// site is what all scripts share.
type site struct {
	// repository is the module's folder.
	repository string
	// dir is for everything that the scripts make. Its path is short: that of a
	// unix socket has 107 bytes at most.
	dir string
	// binary is the program. It is alone in its folder, which scripts have in
	// their PATH.
	binary string
}

// newSite builds the program.
func newSite() (site, error) {
	repository, err := filepath.Abs("../..")
	if err != nil {
		return site{}, err
	}
	dir, err := os.MkdirTemp("", "vg")
	if err != nil {
		return site{}, err
	}
	s := site{repository: repository, dir: dir, binary: filepath.Join(dir, "bin", "virgate")}
	if err := errors.Join(watchSources(), build(s.binary)); err != nil {
		return site{}, errors.Join(err, os.RemoveAll(dir))
	}
	return s, nil
}

func build(to string) error {
	arguments := []string{"build", "-buildvcs=false", "-o", to}
	if raceDetector {
		arguments = append(arguments, "-race")
	}
	_, err := goTool(append(arguments, program)...)
	return err
}

// watchSources looks at every source of the program. The go command notices
// which files a test looks at and runs it again when one has changed; what the
// compiler reads behind the test's back it would not notice.
func watchSources() error {
	const ofModule = `{{if .Module}}{{if .Module.Main}}{{.Dir}}{{range .EmbedFiles}}
{{$.Dir}}/{{.}}{{end}}{{end}}{{end}}`
	list, err := goTool("list", "-deps", "-f", ofModule, program)
	if err != nil {
		return err
	}
	for path := range strings.FieldsSeq(list) {
		info, err := os.Stat(path)
		if err == nil && info.IsDir() {
			_, err = os.ReadDir(path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func goTool(arguments ...string) (string, error) {
	command := exec.Command("go", arguments...)
	output, err := command.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", arguments[0], err, output)
	}
	return string(output), nil
}
