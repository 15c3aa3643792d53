#!/usr/bin/env bash
# Comments on a pull request what its launch scripts change: the step of action.yml.
#
# In: FILES (patterns, one a line), HARDWARE, OPTIONS, BASE, PULL_REQUEST (empty: no comment) and
# GitHub's own variables; in the working directory a checkout with the history of BASE.
# The exit code is the largest of `stagewright diff`; 2 of a file that cannot be read anew.
set -euo pipefail

place=$(mktemp -d)
body=$place/body.md
if ! base=$(git merge-base "$BASE" HEAD); then
    echo "::error::$BASE is not in the checkout; give actions/checkout fetch-depth: 0"
    exit 2
fi
git worktree add --quiet --detach "$place/base" "$base"
trap 'git worktree remove --force "$place/base"; rm -rf "$place"' EXIT
ln -s "$PWD" "$place/head"

readarray -t patterns < <(sed -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' -e '/^$/d' <<< "$FILES")
[ ${#patterns[@]} -gt 0 ] || { echo "::error::files: got none, wanted patterns of launch scripts"; exit 2; }
read -rd '' -a options <<< "$OPTIONS" || true
git diff -z --name-status --find-renames "$base" HEAD -- "${patterns[@]/#/:(glob)}" > "$place/changed"
marker="<!-- stagewright diff $(printf '%s' "$FILES $HARDWARE $OPTIONS" | sha256sum | head -c 12) -->"

starts_nothing() { # old or new: no command of that file is known, as of files that others source
    grep -qE " $1: .*(; wanted a command of |: is no launch file of a tool )" "$place/error"
}

compare() { # OLD NEW, of which OLD may be /dev/null: Markdown, or the error as a block of code
    local code=2 name='' count=0 given=("${options[@]}")
    while [ "$code" = 2 ]; do # once more without variables that these files do not have
        code=0
        (cd "$place" && stagewright diff "$1" "$2" --hardware "$HARDWARE" --markdown "${given[@]}") \
            > "$place/text" 2> "$place/error" || code=$?
        name=$(sed -nE 's/.* has no variable (\w+) that --set could give$/\1/p
                        s/.*--set and --ignore-unknown are of a launch file.*/\\w+/p' "$place/error")
        count=${#given[@]}
        readarray -t given < <([ -z "$name" ] || printf '%s\n' "${given[@]}" |
            sed -E "/^--set=$name=/d; /^--set$/{N;/\n$name=/d}")
        [ -n "$name" ] && [ "${#given[@]}" -lt "$count" ] || break
    done
    if [ -s "$place/text" ]; then
        cat "$place/text"
    elif [ "$1" = /dev/null ] && starts_nothing new && [ "$old_starts" = no ]; then
        echo "Starts nothing that is compared."
        code=0
    else
        sed 's/^/    /' "$place/error"
    fi
    return "$code"
}

readable() { # FILE of the head: no link leads out of the checkout, and no ? begins values
    local path
    path=$(realpath -- "$1") && [[ $1 != *\?* && $path == "$(pwd -P)"/* && $path != "$(pwd -P)"/.git/* ]]
}

worst=0
{
    echo "$marker"
    while IFS= read -rd '' kind && IFS= read -rd '' old; do
        new=$old
        [[ $kind != [RC]* ]] || IFS= read -rd '' new
        printf '\n### `%s`\n\n' "$(printf %s "$new" | tr '`[:cntrl:]' "'?")"
        code=0
        old_starts=no
        [[ $kind == D ]] || readable "$new" || kind=unreadable
        case $kind in
            D) echo "Deleted." ;;
            unreadable)
                echo "Not read: its name has a question mark, or it is a link out of the repository."
                code=2
                ;;
            A) compare /dev/null "head/$new" || code=$? ;;
            *)
                compare "base/$old" "head/$new" || code=$?
                if [ "$code" = 2 ]; then # perhaps of the old one alone
                    code=0
                    starts_nothing old || old_starts=yes
                    printf '\nThe new file alone:\n\n'
                    compare /dev/null "head/$new" || code=$?
                fi
                ;;
        esac
        [ "$code" -le "$worst" ] || worst=$code
    done < "$place/changed"
    [ -s "$place/changed" ] || printf '\nNo launch script changes.\n'
} > "$place/all"
head -c 60000 "$place/all" > "$body" # a comment has at most 65,536 characters
cmp -s "$place/all" "$body" || printf '\n\nCut here: the summary of the job has all.\n' >> "$body"
cat "$place/all" >> "${GITHUB_STEP_SUMMARY:-/dev/stdout}"

if [ -n "$PULL_REQUEST" ]; then
    comments=repos/$GITHUB_REPOSITORY/issues
    of_marker=".[] | select(.body | startswith(\"$marker\")) | .id"
    earlier=$(gh api --paginate "$comments/$PULL_REQUEST/comments" --jq "$of_marker") || earlier=
    earlier=${earlier%%$'\n'*}
    if [ -n "$earlier" ]; then
        posted=(gh api --method PATCH "$comments/comments/$earlier" -F "body=@$body")
    elif [ -s "$place/changed" ]; then
        posted=(gh api "$comments/$PULL_REQUEST/comments" -F "body=@$body")
    else
        posted=(true)
    fi
    "${posted[@]}" > /dev/null ||
        echo "::warning::no comment was written: pull requests of forks have a token that may not"
fi
exit "$worst"
